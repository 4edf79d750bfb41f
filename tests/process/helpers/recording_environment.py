"""A two-turn environment that records its calls, and delays second turns on request."""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast.adapters.rl.environments.base import HELD_OUT, Action, Observation
from holdfast.adapters.rl.environments.two_turns import TwoTurns, make

_POLL_S = 0.005


class RecordingTurns:
    """Two turns of reversing words; each call is a line ``pid ordinal sample turn`` of ``calls``.

    Second turns are not replied to while the file ``gate`` is there.
    """

    def __init__(self, *, seed: int, calls: str, gate: str) -> None:
        self._inner: TwoTurns = make(seed=seed)
        self._calls, self._gate = calls, Path(gate)

    def prompt(self, ordinal: int) -> str:
        return self._inner.prompt(ordinal)

    def respond(self, action: Action) -> Observation:
        if action.ordinal < HELD_OUT:
            self._record(f"{os.getpid()} {action.ordinal} {action.sample} {action.turn}\n")
            while action.turn and self._gate.exists():
                time.sleep(_POLL_S)
        return self._inner.respond(action)

    def _record(self, line: str) -> None:
        file = os.open(self._calls, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
