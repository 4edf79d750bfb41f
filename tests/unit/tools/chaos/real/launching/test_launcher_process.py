"""A launcher that is killed while its job ends is started again for that end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.processes.children import Child
from holdfast.tools.chaos.real.launching.process import LauncherProcess

DYING = "import signal, sys, time; sys.stdin.read(); time.sleep(0.5)"
"""A process that needs half a second to die: so long it still has its process id."""


def test_the_end_of_a_job_waits_for_the_death_of_a_killed_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LaunchConfig(
        command=("true",),
        nodes=(NodeSpec(name="a", domain="a", slots={"trainer": 1}),),
        wanted={"trainer": 1},
        run_dir=tmp_path / "run",
    )
    launcher = LauncherProcess(config)
    started: list[int] = []
    monkeypatch.setattr(launcher, "start", lambda: started.append(launcher.pid))
    ours, theirs = os.pipe()
    launcher._child = Child.start(
        (sys.executable, "-c", DYING), env={**os.environ}, tied=False, stdin=ours
    )
    os.close(ours)
    os.close(theirs)  # it begins to die
    launcher.returns(after_s=600.0)
    launcher.kill()
    assert started == [0], "the dying one obeys no more: another one must end the job"
