"""The tutorial of three islands: one is killed and started again; weights and replay are equal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from document_blocks import blocks
from tree import ROOT

DEADLINE_S = 600.0
CLI = (sys.executable, "-m", "holdfast.tools.cli")
NAMES = ("bari", "lima", "oslo")


def start(place: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CLI, "run", "--island", name, "--sea", "runs/sea", "train.py", f"runs/{name}"],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def islands(place: Path, *command: str) -> str:
    done = subprocess.run(
        [*CLI, "islands", *command, "--sea", "runs/sea"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(2 * DEADLINE_S)
def test_the_tutorial_of_islands_does_what_it_says(tmp_path: Path) -> None:
    (source,) = blocks(ROOT / "docs" / "tutorials" / "islands.md", "python")
    (tmp_path / "train.py").write_text(source)
    running = {name: start(tmp_path, name) for name in NAMES}
    try:
        until_s = time.monotonic() + DEADLINE_S
        manifest = tmp_path / "runs/oslo/step-000000000012/manifest.json"
        while not manifest.exists():
            assert time.monotonic() < until_s, "oslo does not come to step 12"
            time.sleep(0.05)
        os.kill(running["oslo"].pid, signal.SIGKILL)
        running["oslo"].communicate(timeout=DEADLINE_S)
        assert "oslo" in islands(tmp_path, "status")
        running["oslo"] = start(tmp_path, "oslo")
        said = {name: each.communicate(timeout=DEADLINE_S)[0] for name, each in running.items()}
    finally:
        for each in running.values():
            each.kill()
            each.wait()
    hashes = {re.findall(r"weights ([0-9a-f]{12})", text)[-1] for text in said.values()}
    assert len(hashes) == 1, said
    again = islands(tmp_path, "replay", "--from", "runs/bari", "--step", "4")
    assert "the weights that the last island left are those of the replay" in again
    assert "all have left" in islands(tmp_path, "status", "--listen", "0.1")
