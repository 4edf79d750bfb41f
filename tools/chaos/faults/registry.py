"""The families of faults for jobs of real processes, and the injector for each kind.

Each family is an `Injector`. It needs a `JobAccess` and nothing else of the world that it strikes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from holdfast.tools.chaos.faults import (
    bits,
    engines,
    environments,
    inside,
    processes,
    store,
    throttle,
)
from holdfast.tools.chaos.faults.etcd import coordinator
from holdfast.tools.chaos.faults.injector import Injector
from holdfast.tools.chaos.faults.network import cut, wire
from holdfast.tools.chaos.faults.preloaded import clock, disk


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Kinds of faults that share an injector, and the function that makes it for a run."""

    kinds: frozenset[str]
    make: Callable[[], Injector]


_FAMILIES: Final[tuple[Family, ...]] = (
    Family(kinds=processes.KINDS, make=processes.Processes),
    Family(kinds=environments.KINDS, make=environments.EnvironmentInjector),
    Family(kinds=inside.KINDS, make=inside.InsideInjector),
    Family(kinds=engines.KINDS, make=engines.EngineInjector),
    Family(kinds=throttle.KINDS, make=throttle.ThrottleInjector),
    Family(kinds=throttle.MEMORY_KINDS, make=throttle.MemoryLimitInjector),
    Family(kinds=bits.KINDS, make=bits.BitsInjector),
    Family(kinds=disk.KINDS, make=disk.DiskInjector),
    Family(kinds=clock.KINDS, make=clock.ClockInjector),
    Family(kinds=store.KINDS, make=store.StoreInjector),
    Family(kinds=coordinator.KINDS, make=coordinator.CoordinatorInjector),
    Family(kinds=cut.KINDS, make=cut.NetworkInjector),
    Family(kinds=wire.KINDS, make=wire.WireInjector),
)


def families() -> tuple[Family, ...]:
    """Return all families; no kind is in two. The results of their `prepare` are merged."""
    return _FAMILIES


INJECTORS: Final[dict[str, Callable[[], Injector]]] = {
    kind: family.make for family in families() for kind in family.kinds
}
"""Kind → function that makes its injector for a world of real processes."""


def for_kinds(kinds: Iterable[str]) -> dict[str, Injector]:
    """Return an injector for each kind; kinds of one family share one.

    Raises ``KeyError`` for a kind without an injector.
    """
    made: dict[Callable[[], Injector], Injector] = {}
    found: dict[str, Injector] = {}
    for kind in sorted(set(kinds)):
        make = INJECTORS[kind]
        if make not in made:
            made[make] = make()
        found[kind] = made[make]
    return found
