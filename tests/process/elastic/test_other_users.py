"""Another user of the machine sees of a running job that it runs, and nothing else."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from jobs import job

from holdfast.ckpt.memory.arena import arena_path
from holdfast.elastic.agent.notice import NoticeConfig

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

LOOK = """
for folder in $FOLDERS; do find "$folder" -type f -readable 2>/dev/null; done
for pid in $PIDS; do
    for part in environ maps mem; do
        head -c 1 /proc/$pid/$part >/dev/null 2>&1 && echo /proc/$pid/$part
    done
    tr '\\0' ' ' < /proc/$pid/cmdline; echo
done
"""


def test_another_user_sees_no_key_no_state_no_event_and_no_setting(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="test-others-") as open_to_all:
        place = Path(open_to_all)
        place.chmod(0o755)
        notice = NoticeConfig(url="http://127.0.0.1:9/", headers={"Token": "secret-token"})
        env = {"API_KEY": "secret-key"}
        with job(place, capture_output=True, notice=notice, env=env) as running:
            running.await_step(2)
            (found,) = running.launcher.processes().values()
            folders = [running.launcher.run_dir, arena_path(running.launcher.run, "n0")]
            pids = [found.agent, found.sidecar, *found.workers.values()]
            names = {path.name for path in running.launcher.run_dir.iterdir()}
            assert {"key.json", "events-n0.jsonl", "processes-n0.json", "logs"} <= names
            for path in (running.launcher.run_dir, *running.launcher.run_dir.rglob("*")):
                assert path.stat().st_mode & 0o077 == 0, path
            seen = look(folders, pids)
    assert [
        line for line in seen if line.startswith("/proc/") or line.startswith(open_to_all)
    ] == []
    assert any("holdfast.elastic.agent" in line for line in seen)
    assert not any("secret" in line for line in seen)


def look(folders: list[Path], pids: list[int]) -> list[str]:
    done = subprocess.run(
        ["/bin/sh", "-c", LOOK],
        env={
            "PATH": os.defpath,
            "FOLDERS": " ".join(map(str, folders)),
            "PIDS": " ".join(map(str, pids)),
        },
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()
