"""Which injector does which kind of fault."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Final, cast

from tools.chaos.injector import Injector

_PROCESSES: Final = "tools.chaos.faults.processes:Processes"

INJECTORS: Final[dict[str, str]] = {
    "kill": _PROCESSES,
    "lose": _PROCESSES,
    "stop": _PROCESSES,
    "slow": _PROCESSES,
    "preempt": _PROCESSES,
    "join": _PROCESSES,
    "leave": _PROCESSES,
}
"""Kind → ``module:class`` of what does it in a world of real processes; imported when it is used.

The class is called without arguments.
"""


def for_kinds(kinds: Iterable[str]) -> dict[str, Injector]:
    """Return an injector for each kind; kinds of one family share one."""
    made: dict[str, Injector] = {}
    found: dict[str, Injector] = {}
    for kind in sorted(set(kinds)):
        place = INJECTORS[kind]
        if place not in made:
            module, _, name = place.partition(":")
            made[place] = cast("Injector", getattr(importlib.import_module(module), name)())
        found[kind] = made[place]
    return found
