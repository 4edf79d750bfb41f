"""Islands as processes of their own, started by hand, and the logbook that they write."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec
from fork_servers import forking
from tree import HELPERS

SCRIPT = HELPERS / "island_training.py"
DEADLINE_S = 240.0

_IMPORTS = ("torch", "torch.distributed.fsdp", "holdfast.elastic.loop.generations")


def _island(script: str, argv: list[str], log: str, environment: dict[str, str]) -> None:
    """Be a program that was started by hand, in a session of its own."""
    os.setsid()
    os.environ.clear()  # that of the server, which began with another test
    os.environ.update(environment)
    said = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = [script, *argv]
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:  # noqa: BLE001 -- as the interpreter does
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


class Sea:
    """The islands of one test, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.meet = folder, folder / "sea"
        self._running: dict[str, ForkServerProcess] = {}

    def flags(self, name: str, *flags: object) -> list[str]:
        """Return the flags of an island's script."""
        fixed = ["--name", name, "--meet", self.meet, "--result", self.result(name)]
        return [str(each) for each in (*fixed, *flags)]

    def start(self, name: str, *flags: object, script: Path = SCRIPT) -> None:
        """Start an island as a run of one rank, without the seconds that its imports take."""
        argv, log = self.flags(name, *flags), str(self.folder / f"{name}.log")
        args = (str(script), argv, log, dict(os.environ))
        process = forking(*_IMPORTS).Process(target=_island, args=args)
        process.start()
        self._running[name] = process

    def result(self, name: str) -> Path:
        """Return the file with an island's result."""
        return self.folder / f"{name}.json"

    def pid(self, name: str) -> int:
        """Return the process of an island."""
        pid = self._running[name].pid
        assert pid is not None
        return pid

    def kill(self, name: str) -> None:
        """Kill an island with everything that belongs to it."""
        pid, running = self.pid(name), self._running.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        running.kill()
        running.join()

    def finish(self, *names: str) -> list[dict[str, Any]]:
        """Wait for the end of islands; return their results."""
        return [self._finish(name) for name in names]

    def exit(self, name: str) -> tuple[int, str]:
        """Wait for the end of an island; return its status and its output."""
        running = self._running.pop(name)
        running.join(DEADLINE_S)
        assert running.exitcode is not None, f"{name} does not end"
        return running.exitcode, (self.folder / f"{name}.log").read_text()

    def _finish(self, name: str) -> dict[str, Any]:
        status, said = self.exit(name)
        assert status == 0, said[-4000:]
        assert "touched() did not name" not in said, said[-4000:]
        found: dict[str, Any] = json.loads(self.result(name).read_text())
        return found

    def records(self, kind: str = "") -> list[dict[str, Any]]:
        """Return the records of the logbook, of one kind or all."""
        paths = sorted((self.meet / "logbook").glob("*.json"))
        found = [msgspec.json.decode(path.read_bytes()) for path in paths]
        return [record for record in found if kind in ("", record["kind"])]

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        end_s = time.monotonic() + DEADLINE_S
        while not holds():
            logs = (self.folder / f"{name}.log" for name in self._running)
            said = [log.read_text()[-2000:] for log in logs if log.exists()]
            assert time.monotonic() < end_s, (self.records(), said)
            time.sleep(0.02)

    def close(self) -> None:
        """End every island."""
        for name in list(self._running):
            self.kill(name)


@contextmanager
def sea(folder: Path) -> Iterator[Sea]:
    """Yield a sea; on leaving, all its islands have ended."""
    folder.mkdir(exist_ok=True)
    found = Sea(folder)
    try:
        yield found
    finally:
        found.close()
