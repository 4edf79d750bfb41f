"""`holdfast check` is quiet on every loop of the library.

The runs are those that the command plans, and it compares them. Their ranks are forked from a
server instead of started, so that all loops take minutes. The last test takes no such short cut.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from catalogue import LOOPS, Loop
from cluster import Cluster, cluster
from forked_check import PRELOAD, checked

SCRIPT = Path(__file__).with_name("run_loop.py")
ALWAYS = ("early_stopping", "env_per_rank", "gan", "muon_fsdp")
"""Of every test run: an early end, state of one rank, phases, shards."""
DEADLINE_S = 280.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    with cluster(PRELOAD, *(x.path for x in LOOPS)) as found:
        yield found


def cases() -> list[object]:
    rest = pytest.mark.exhaustive
    return [
        pytest.param(loop, id=loop.name, marks=() if loop.name in ALWAYS else rest)
        for loop in LOOPS
    ]


@pytest.mark.parametrize("loop", cases())
def test_every_run_gives_the_same(loop: Loop, ranks: Cluster, tmp_path: Path) -> None:
    report = checked(ranks, tmp_path, module=loop.path)
    assert report.findings == []
    assert {run.property for run in report.checked} >= {"again", "ranks", "kills", "disk"}
    assert not [note for note in report.notes if note.startswith("no ")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_the_command_itself_is_quiet(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    report = tmp_path / "report.json"
    words = [sys.executable, "-m", "holdfast.tools.cli", "check", "--json", report]
    done = subprocess.run(
        [str(word) for word in [*words, SCRIPT, loop.name, tmp_path]],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert msgspec.json.decode(report.read_bytes())["findings"] == []
