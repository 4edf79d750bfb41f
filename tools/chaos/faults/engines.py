"""Faults from within the server that a worker keeps (`holdfast.rl.keep_server`).

The server of the ready workload looks for orders (`holdfast.tools.chaos.workloads.answers_server`)
in a folder, by the process id of its keeper; any other server can do so too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from holdfast.tools.chaos.faults.injector import JobAccess, MissedError, Undo, Victim
from holdfast.tools.chaos.scenarios.strikes import Strike

ENGINES: Final = "HOLDFAST_CHAOS_ENGINES"
"""Environment variable with the folder of the orders."""

LISTENS: Final = ".listens"
"""Suffix of the file that marks the keeper of a server that obeys."""

_AMOUNTS: Final[Mapping[str, float]] = {
    "engine-kill": 0,
    "engine-hang": 0,
    "engine-garbage": 1,
    "engine-slow": 1.0,
    "engine-stale": 0,
    "engine-memory": 0,
}

KINDS: Final = frozenset(_AMOUNTS)


class EngineInjector:
    """Writes orders for the servers of the struck workers."""

    def __init__(self) -> None:
        self._folder = Path()

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Name the folder of the orders to all servers."""
        self._folder = site.folder / "engines"
        self._folder.mkdir(parents=True, exist_ok=True)
        return {ENGINES: str(self._folder)}

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Give the order to the server of a worker."""
        keepers = [pid for pid in victim.pids if (self._folder / f"{pid}{LISTENS}").exists()]
        if not keepers:
            raise MissedError(f"{victim.name} keeps no server that listens for injected faults")
        amount = _AMOUNTS[strike.kind] if strike.amount is None else strike.amount
        for pid in keepers:
            self._order(pid, {"number": strike.number, "do": strike.kind, "amount": amount})
        return self._undo(strike.number, keepers) if strike.lasts_s else None

    def close(self) -> None:
        """Do nothing: the orders end with the servers."""

    def _undo(self, number: int, pids: list[int]) -> Callable[[], None]:
        def undo() -> None:
            for pid in pids:
                self._order(pid, {"number": number, "do": "end", "amount": 0})

        return undo

    def _order(self, pid: int, order: Mapping[str, object]) -> None:
        """Replace the order of a server, so that it is never seen half written."""
        draft = self._folder / f".{pid}.draft"
        draft.write_text(json.dumps(order))
        draft.replace(self._folder / f"{pid}.json")
