"""Disk faults for some processes below the run's folder: full, broken, slow, read-only, torn.

Files that record the run are not affected: ``*.jsonl``, ``*.log``, and the output.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, Final

from holdfast.tools.chaos.faults.injector import JobAccess, MissedError, Undo, Victim
from holdfast.tools.chaos.faults.preloaded.preload import (
    FAIL,
    GROW,
    NAME,
    OPEN_NEW,
    OPEN_WRITE,
    READ,
    SLOW,
    SYNC,
    TEAR,
    WRITE,
    Preload,
)
from holdfast.tools.chaos.scenarios.scenario import SEA, ScenarioError
from holdfast.tools.chaos.scenarios.strikes import Strike

_SLOW_S: Final = 0.05
_TORN_SHARE: Final = 0.5
_CUT: Final = "sea-cut"
_FAILING: Final[Mapping[str, dict[str, int]]] = {
    "disk-full": {"error": errno.ENOSPC, "ops": OPEN_NEW | WRITE | GROW},
    "disk-error": {"error": errno.EIO, "ops": WRITE | READ | SYNC},
    "disk-write-error": {"error": errno.EIO, "ops": WRITE | SYNC | GROW},
    "disk-readonly": {"error": errno.EROFS, "ops": OPEN_NEW | OPEN_WRITE | WRITE | GROW | NAME},
    _CUT: {"error": errno.ETIMEDOUT, "ops": OPEN_NEW | OPEN_WRITE | WRITE | READ | GROW | NAME},
}

KINDS: Final = frozenset({*_FAILING, "disk-slow", "disk-torn"})


class DiskInjector:
    """Makes calls of the C library fail or take long."""

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Compile the library that is loaded before the C library. Raises ``ScenarioError``."""
        for strike in strikes:
            if strike.kind == "disk-torn" and not 0 <= (strike.amount or 0) < 1:
                raise ScenarioError(
                    f"strike {strike.number} (disk-torn): amount is {strike.amount:g}, the share "
                    "of the write that arrives: 0 or more, less than 1"
                )
        self._preload = Preload(site)
        return self._preload.environment

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Put the rule in force."""
        if not victim.pids:
            raise MissedError(f"{victim.name}: it has no process")
        kind, fields = _rule(strike)
        folder = site.folder.resolve()
        if strike.kind == _CUT:
            folder = folder / "work" / SEA
        undo = self._preload.add(kind, victim.pids, folder=f"{folder}/".encode(), **fields)
        return undo if strike.lasts_s else None

    def close(self) -> None:
        """Do nothing: the rules end with the run's folder."""


def _rule(strike: Strike) -> tuple[int, dict[str, Any]]:
    if strike.kind == "disk-slow":
        seconds = _SLOW_S if strike.amount is None else strike.amount
        return SLOW, {"ops": WRITE | READ | SYNC, "delay_ns": int(seconds * 1e9)}
    if strike.kind == "disk-torn":
        return TEAR, {
            "ops": WRITE,
            "share": _TORN_SHARE if strike.amount is None else strike.amount,
        }
    return FAIL, dict(_FAILING[strike.kind])
