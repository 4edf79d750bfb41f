"""Whole RL jobs: in one process, on three nodes of a launcher, or by the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forked_scripts import ran
from jobs import PATIENT, PRELOAD, Job
from session_imports import IMPORTING_ONCE, session_imports

from holdfast.adapters.rl.config import RLConfig, save_config
from holdfast.ckpt.memory import kept
from holdfast.ckpt.memory.arena import ARENA_ROOT, sweep
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.launch.local import Launcher
from holdfast.tools.leftovers import leftovers, memory_of, processes_of

DEADLINE_S = 200.0
_MODULE = "holdfast.rl"
MAIN = (sys.executable, "-u", "-m", _MODULE)  # as the session's server
NODES = {"a": ("trainer", "rollout"), "b": ("trainer",), "c": ("rollout",)}


def alone(directory: Path, config: RLConfig) -> dict[str, Any]:
    """Run the job in one process and return its outcome."""
    save_config(config, directory / "config.json")
    words = ["--config", str(directory / "config.json"), "--result", str(directory / "result.json")]
    done = ran([*MAIN, *words])
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads((directory / "result.json").read_bytes())
    return outcome


@contextmanager
def rl_job(directory: Path, config: RLConfig, *, rollouts: int = 2) -> Iterator[Job]:
    save_config(config, directory / "config.json")
    words = ("--config", str(directory / "config.json"), "--result", str(directory / "result.json"))
    wanted = {"trainer": 2} | ({"rollout": rollouts} if rollouts else {})
    order = LaunchConfig(
        command=(*MAIN, *words),
        nodes=tuple(
            NodeSpec(name=name, domain=name, slots={role: 1 for role in roles if role in wanted})
            for name, roles in NODES.items()
            if wanted.keys() & set(roles)
        ),
        wanted=wanted,
        run_dir=directory / "run",
        timing=PATIENT,
        preload=PRELOAD,
        capture_output=True,
    )
    launcher = Launcher(order, imports=session_imports(order))
    launcher.start()
    try:
        yield Job(launcher)
    finally:
        launcher.stop("the test is over")
        if launcher.wait(20) is None:
            launcher.kill()
            launcher.wait(20)
        assert leftovers(launcher.run, timeout_s=DEADLINE_S) == []


class CommandedJob:
    """A job that ``holdfast run`` started: two trainers and rollout workers on two nodes."""

    def __init__(
        self, directory: Path, config: RLConfig, *flags: str | Path, rollouts: int = 1
    ) -> None:
        directory.mkdir()
        save_config(config, directory / "config.json")
        self.run_dir, self._result = directory / "run", directory / "result.json"
        self.run_dir.mkdir()
        words = ["--nodes", "2", "--run-dir", str(self.run_dir)]
        words += ["--role", f"rollout={rollouts}"] if rollouts else []
        words += map(str, flags)
        script = ["--config", str(directory / "config.json"), "--result", str(self._result)]
        self._said = directory / "said.txt"
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.tools.cli", "run", *words, "-m", _MODULE, *script],
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, **IMPORTING_ONCE},
            )
        launcher: Any = SimpleNamespace(run_dir=self.run_dir)
        self.job = Job(launcher)
        """Its events; there is no launcher to ask for more."""
        try:
            first = self.job.await_event(lambda e: e["kind"] == "job_started")
        except AssertionError:
            self._process.kill()
            raise
        self.run = str(first["run"])

    def kill_all(self) -> None:
        """End the command and everything that it started, at one blow.

        With nobody left to clear up, what was in shared memory is for the next job to sweep.
        """
        self._process.kill()
        self._process.wait()
        deadline_s = time.monotonic() + DEADLINE_S
        while left := processes_of(self.run):
            assert time.monotonic() < deadline_s, left
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def result(self) -> dict[str, Any]:
        """Wait for the end and return the outcome."""
        assert self._process.wait(DEADLINE_S) == 0, self._said.read_text()
        outcome: dict[str, Any] = json.loads(self._result.read_bytes())
        return outcome


@contextmanager
def commanded(
    directory: Path, config: RLConfig, *flags: str | Path, rollouts: int = 1
) -> Iterator[CommandedJob]:
    """Start a job by the command with these flags; on leaving nothing of it is left."""
    command = CommandedJob(directory, config, *flags, rollouts=rollouts)
    try:
        yield command
    finally:
        command.kill_all()
        for name in memory_of(command.run):
            kept.give_up(ARENA_ROOT / name)  # nobody starts this launcher again
        deadline_s = time.monotonic() + DEADLINE_S
        while left := leftovers(command.run, timeout_s=0.1):
            assert time.monotonic() < deadline_s, left
            sweep()  # a process that is ending may still hold some of it
