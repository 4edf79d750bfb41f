"""Processes that act on orders read as lines, and a world of them for the injectors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.tools.chaos.faults.injector import Victim
from holdfast.tools.chaos.scenarios.catalogue import Part
from holdfast.tools.chaos.scenarios.scenario import StrikeTarget, When
from holdfast.tools.chaos.scenarios.strikes import Strike

_REPOSITORY = Path(__file__).parents[3]

_LISTENS = """
import errno, json, os, socket, sys, threading, time
for line in sys.stdin:
    try:
        mode = "exec" if line.startswith("!") else "eval"
        found = exec(line[1:]) if mode == "exec" else eval(line)
        print(json.dumps([True, found]), flush=True)
    except OSError as error:
        print(json.dumps([False, errno.errorcode.get(error.errno, str(error))]), flush=True)
"""


class Remote:
    """A Python process that executes the lines it receives, one at a time."""

    def __init__(self, env: Mapping[str, str], **more: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", _LISTENS],
            env={"PYTHONPATH": str(_REPOSITORY / "src"), **os.environ, **more, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.begins("'ready'")
        assert self.ends() == [True, "ready"]

    @property
    def pid(self) -> int:
        return self.process.pid

    def does(self, line: str) -> Any:
        """Return what an expression is; the name of the error where it fails with an OSError."""
        self.begins(line)
        return self.ends()[1]

    def begins(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ends(self) -> Any:
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # with its children, who have its pipes too
        self.process.communicate()


class Site:
    """See `holdfast.tools.chaos.faults.injector.JobAccess`: what the test puts there."""

    def __init__(self, folder: Path, *, run: str = "") -> None:
        self.folder, self.run = folder, run
        self.there: dict[Part, list[Victim]] = {}

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(victim.node for victim in self.there.get("node", ()))

    def victims(self, part: Part) -> list[Victim]:
        return self.there.get(part, [])

    def lose(self, node: str, *, even_last: bool = False) -> bool:
        return False

    def give_back(self, node: str) -> None:
        pass

    def add(self, name: str, *pids: int, part: Part = "worker", node: str = "") -> Victim:
        victim = Victim(name=name, part=part, pids=pids, node=node)
        self.there.setdefault(part, []).append(victim)
        return victim


def struck(
    kind: str, *, amount: float | None = None, lasts_s: float = 0.0, pick: float = 0.5
) -> Strike:
    """Return a strike, whose target and moment no injector looks at."""
    return Strike(
        number=7,
        kind=kind,
        target=StrikeTarget(),
        when=When(s=0.0),
        pick=pick,
        lasts_s=lasts_s,
        amount=amount,
    )
