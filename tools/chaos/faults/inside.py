"""Faults from within a Python process; the program needs no change.

An agent (`shim/holdfast_inside.py`) runs in every Python of the job, through a folder put before
its PYTHONPATH, and waits for orders. A Python that is started with ``-E`` or ``-I`` has no agent.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.tools.chaos.faults.environment import before
from holdfast.tools.chaos.faults.injector import JobAccess, MissedError, Undo, Victim
from holdfast.tools.chaos.faults.shim.holdfast_inside import ORDERS, TRAINS
from holdfast.tools.chaos.scenarios.scenario import ScenarioError
from holdfast.tools.chaos.scenarios.strikes import Strike

_SHIM: Final = Path(__file__).with_name("shim")
_AMOUNTS: Final[Mapping[str, float]] = {
    "exit": 1,
    "segfault": 0,
    "gil-lockup": 0,
    "memory-balloon": 1024,
    "cpu-burn": 0,
    "slow-rank": 1.0,
    "nan-loss": 0,
    "inf-loss": 0,
    "corrupt-gradient": 1,
}
_VALUES: Final = {"nan-loss": "nan", "inf-loss": "inf"}
_OF_TRAINING: Final = {"slow-rank", "nan-loss", "inf-loss", "corrupt-gradient"}
_ENDED: Final = {"memory-balloon", "cpu-burn", "slow-rank"}
_MOST_STATUS: Final = 255

KINDS: Final = frozenset(_AMOUNTS)


class InsideInjector:
    """Sends orders to the agents of the struck processes."""

    def __init__(self) -> None:
        self._folder = Path()

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Put the agent into every Python of the job."""
        for strike in strikes:
            if strike.kind == "exit" and not 0 <= _amount(strike) <= _MOST_STATUS:
                raise ScenarioError(
                    f"strike {strike.number} (exit): amount is {_amount(strike):g}; an exit "
                    f"status is from 0 to {_MOST_STATUS}"
                )
        self._folder = site.folder / "orders"
        self._folder.mkdir(parents=True, exist_ok=True)
        return {ORDERS: str(self._folder), "PYTHONPATH": before("PYTHONPATH", str(_SHIM))}

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Send the order to every process of the victim that has an agent."""
        order = {
            "number": strike.number,
            "do": strike.kind,
            "amount": _amount(strike),
            "lasts_s": strike.lasts_s,
            "pick": strike.pick,
        }
        if strike.kind in _VALUES:
            order["value"] = _VALUES[strike.kind]
        pids = [pid for pid in victim.pids if self._can(strike, pid)]
        struck = [pid for pid in pids if self._tell(pid, order)]
        if not struck:
            raise MissedError(
                f"{victim.name}: none of its processes listens for injected faults"
                + (" and has imported torch.optim" if strike.kind in _OF_TRAINING else "")
            )
        lasts = strike.kind in _ENDED and strike.lasts_s
        return self._undo(strike.number, struck) if lasts else None

    def close(self) -> None:
        """Do nothing: the agents end with their processes."""

    def _can(self, strike: Strike, pid: int) -> bool:
        return strike.kind not in _OF_TRAINING or (self._folder / f"{pid}{TRAINS}").exists()

    def _undo(self, number: int, pids: list[int]) -> Callable[[], None]:
        def undo() -> None:
            for pid in pids:
                self._tell(pid, {"do": "end", "number": number})

        return undo

    def _tell(self, pid: int, order: dict[str, Any]) -> bool:
        """Write an order; False if there is no reader: no agent, or the process is gone."""
        with contextlib.suppress(FileNotFoundError):
            try:
                fifo = os.open(self._folder / f"{pid}.fifo", os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return False
                raise
            try:
                os.write(fifo, json.dumps(order).encode() + b"\n")
            finally:
                os.close(fifo)
            return True
        return False


def _amount(strike: Strike) -> float:
    return _AMOUNTS[strike.kind] if strike.amount is None else strike.amount
