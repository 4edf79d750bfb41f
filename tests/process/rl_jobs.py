"""Whole RL jobs: in one process, or on three nodes of a launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs import Job

from adapters.rl.config import RLConfig, save_config
from elastic.launch import LaunchConfig, Launcher, NodeSpec
from tools.leftovers import leftovers

DEADLINE_S = 100.0
MAIN = (sys.executable, "-m", "adapters.rl.main")
NODES = {"a": ("trainer", "rollout"), "b": ("trainer",), "c": ("rollout",)}


def alone(directory: Path, config: RLConfig) -> dict[str, Any]:
    """Run the job in one process and return its outcome."""
    save_config(config, directory / "config.json")
    words = ["--config", str(directory / "config.json"), "--result", str(directory / "result.json")]
    done = subprocess.run(
        [*MAIN, *words], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads((directory / "result.json").read_bytes())
    return outcome


@contextmanager
def rl_job(directory: Path, config: RLConfig) -> Iterator[Job]:
    save_config(config, directory / "config.json")
    words = ("--config", str(directory / "config.json"), "--result", str(directory / "result.json"))
    launcher = Launcher(
        LaunchConfig(
            command=(*MAIN, *words),
            nodes=tuple(
                NodeSpec(name=name, domain=name, slots=dict.fromkeys(roles, 1))
                for name, roles in NODES.items()
            ),
            wanted={"trainer": 2, "rollout": 2},
            run_dir=directory / "run",
            capture_output=True,
        )
    )
    launcher.start()
    try:
        yield Job(launcher)
    finally:
        launcher.stop("the test is over")
        if launcher.wait(20) is None:
            launcher.kill()
            launcher.wait(20)
        assert leftovers(launcher.run) == []
