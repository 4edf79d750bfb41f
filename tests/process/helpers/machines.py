"""Several launchers of one job, which represent as many machines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from lan import Lan
from ports import free_ports
from session_imports import IMPORTING_ONCE
from torchruns import DEADLINE_S
from undisturbed import WAITING

from holdfast.elastic.agent.reporting import NodeProcesses, read_all_processes
from holdfast.elastic.launch.coordinator_process import read_record

Line = dict[str, Any]


class Machines:
    """Launchers of one job: on this machine, or each on one of a `Lan`."""

    def __init__(self, directory: Path, *, lan: Lan | None = None) -> None:
        self.directory, self._lan = directory, lan
        (self.port,) = free_ports(1)
        self.log, self.end = directory / "log.jsonl", directory / "end"
        self._started: list[tuple[subprocess.Popen[bytes], Path]] = []

    @property
    def place(self) -> str:
        """The meeting point of the launchers, on the first machine."""
        return f"{self._lan.machines[0].address if self._lan else 'localhost'}:{self.port}"

    def start(
        self, *options: str, script: Sequence[str] = (str(WAITING),), again: int | None = None
    ) -> int:
        """Start a launcher; return its number, which counts those that died.

        One that is started ``again`` has the run directory and the address of that number.
        """
        started = len(self._started)
        number = started if again is None else again
        run_dir = self.run_dir(number)
        machine = self._lan.machines[number] if self._lan else None
        env = {
            **os.environ,
            **(IMPORTING_ONCE if script == (str(WAITING),) else {}),  # others need no torch
            "HOLDFAST_TEST_LOG": str(self.log),
            "HOLDFAST_TEST_END": str(self.end),
            "HOLDFAST_KEY_FILE": str(self.directory / "key.json"),
        }
        argv = [
            *(sys.executable, "-m", "holdfast.tools.cli", "run", "--run-dir", str(run_dir)),
            *("--host", machine.address if machine else f"127.0.0.{number + 2}"),
            *options,
            *script,
        ]
        if machine:
            argv = machine.command(*argv)
        with (self.directory / f"launcher{started}.log").open("wb") as output:
            process = subprocess.Popen(argv, env=env, stdout=output, stderr=output)
        self._started.append((process, run_dir))
        return started

    def lose(self, number: int) -> None:
        """SIGKILL a launcher and everything it started, at one blow."""
        self.signal_all(number, signal.SIGKILL)
        self._started[number][0].wait(DEADLINE_S)

    def signal_all(self, number: int, which: signal.Signals) -> None:
        """Send a signal to a launcher and everything it started."""
        process, run_dir = self._started[number]
        pids = [process.pid]
        if (record := read_record(run_dir)) is not None:
            pids.append(record.pid)
        for node in read_all_processes(run_dir).values():
            pids += [node.agent, node.sidecar, *node.workers.values()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)

    def run_dir(self, number: int) -> Path:
        """Return where a launcher keeps events and logs."""
        return self.directory / f"run{number}"

    def signal(self, number: int, which: signal.Signals) -> None:
        """Send a launcher a signal."""
        self._started[number][0].send_signal(which)

    def processes(self, number: int) -> NodeProcesses:
        """Return the processes of a launcher's one node."""
        (node,) = read_all_processes(self.run_dir(number)).values()
        return node

    def lines(self) -> list[Line]:
        """Return what the workers said."""
        if not self.log.exists():
            return []
        return [msgspec.json.decode(line) for line in self.log.read_bytes().splitlines()]

    def await_lines(self, wanted: Callable[[Line], bool], *, count: int, after: int = 0) -> None:
        """Wait for so many wanted lines from number ``after`` on."""
        deadline_s = time.monotonic() + DEADLINE_S
        while sum(map(wanted, self.lines()[after:])) < count:
            assert time.monotonic() < deadline_s, f"{self.lines()}\n{self.output()}"
            time.sleep(0.02)

    def await_protected(self, step: int, *numbers: int) -> None:
        """Wait until the nodes of these launchers know that a step is protected."""
        deadline_s = time.monotonic() + DEADLINE_S
        while any(self.processes(number).progress < step for number in numbers):
            assert time.monotonic() < deadline_s, self.output()
            time.sleep(0.02)

    def output(self) -> str:
        """Return the ends of what the launchers said."""
        logs = sorted(self.directory.glob("launcher*.log"))
        return "\n".join(f"-- {log.name}\n{log.read_text()[-3000:]}" for log in logs)

    def await_end(self, number: int) -> int:
        """Return a launcher's exit status."""
        return self._started[number][0].wait(DEADLINE_S)

    def run(self, number: int) -> str:
        """Return the run that a launcher's coordinator serves."""
        record = read_record(self._started[number][1])
        assert record is not None, self.output()
        return record.run

    def close(self) -> None:
        """End whatever is left."""
        for number, (process, _) in enumerate(self._started):
            if process.poll() is None:
                self.lose(number)


def waits(world: int) -> Callable[[Line], bool]:
    """Say which lines tell that a rank of so large a world waits in its step."""
    return lambda line: "waits" in line and line["world"] == world
