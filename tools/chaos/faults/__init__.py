"""What hurts a job of real processes, one module per family.

Each is an `Injector` that needs a `Site` and nothing else of the world that it strikes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.tools.chaos.faults import bits, inside, processes, store, throttle
from holdfast.tools.chaos.faults.environment import together
from holdfast.tools.chaos.faults.etcd import coordinator
from holdfast.tools.chaos.faults.injector import Injector
from holdfast.tools.chaos.faults.network import cut, wire
from holdfast.tools.chaos.faults.preloaded import clock, disk

__all__ = ["FaultFamily", "families", "together"]


class FaultFamily(msgspec.Struct, frozen=True, kw_only=True):
    """Kinds of faults that share an injector, and what makes one for a run."""

    kinds: frozenset[str]
    make: Callable[[], Injector]


_FAMILIES: Final[tuple[FaultFamily, ...]] = (
    FaultFamily(kinds=processes.KINDS, make=processes.Processes),
    FaultFamily(kinds=inside.KINDS, make=inside.InsideInjector),
    FaultFamily(kinds=throttle.KINDS, make=throttle.ThrottleInjector),
    FaultFamily(kinds=bits.KINDS, make=bits.BitsInjector),
    FaultFamily(kinds=disk.KINDS, make=disk.DiskInjector),
    FaultFamily(kinds=clock.KINDS, make=clock.ClockInjector),
    FaultFamily(kinds=store.KINDS, make=store.StoreInjector),
    FaultFamily(kinds=coordinator.KINDS, make=coordinator.CoordinatorInjector),
    FaultFamily(kinds=cut.KINDS, make=cut.NetworkInjector),
    FaultFamily(kinds=wire.KINDS, make=wire.WireInjector),
)


def families() -> tuple[FaultFamily, ...]:
    """Return all of them; no kind is in two. What their `prepare` return goes `together`."""
    return _FAMILIES
