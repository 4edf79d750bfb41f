"""A job whose members are read from etcd alone: what the readers print of it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from etcd_fixtures import StartCluster
from jobs import DEADLINE_S, hurt, job

LONG = ("--steps", "1000000")


def said(*words: str) -> str:
    command = [sys.executable, "-m", "holdfast.tools.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readers_know_the_members_the_plan_and_its_reason(
    tmp_path: Path, start_etcd: StartCluster
) -> None:
    cluster = start_etcd(1)
    with job(tmp_path, *LONG, nodes=2, per_node=1, coordinator=cluster.url) as running:
        running.await_step(3)
        key = Path(running.launcher.run_dir) / "key.json"
        words = ("--coordinator", cluster.url, "--key-file", str(key))
        now = said("top", "--once", *words)
        assert "training: step not known, generation 1, 2 trainers" in now
        hurt(running.worker("trainer/1"))
        back = running.world_of(2, generation=2)["generation"]
        deadline_s = time.monotonic() + DEADLINE_S
        while f"generation {back}" not in (now := said("top", "--once", *words)):
            assert time.monotonic() < deadline_s, now
        page = tmp_path / "run.html"
        said("dashboard", *words, "--export", str(page))
        assert "n0" in page.read_text()
