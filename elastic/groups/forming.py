"""Formation of gloo groups: all ranks connect with all, or, of many ranks, only those that talk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from holdfast.ckpt import torch_private
from holdfast.ckpt.torch_private import Store
from holdfast.elastic.groups.apart import PointsOf
from holdfast.elastic.groups.circles import WorldScale
from holdfast.elastic.groups.lazy import LazyGloo
from holdfast.elastic.groups.waits import Joined, WaitGuard
from holdfast.elastic.meeting.exchange import RankExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeWorld:
    """The meeting points of the ranks of a large world, and its limits."""

    points: PointsOf
    scale: WorldScale


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGroup:
    """A group to form: ``ranks`` are numbers in the world, and this is number ``index`` of them.

    Those of an ``eager`` one connect all with all, even if they are many.
    """

    name: str
    ranks: Sequence[int]
    index: int
    timeout: timedelta
    eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Forming:
    """The way in which a generation's groups form: under ``guard``, listening at ``host``."""

    guard: WaitGuard
    host: str
    large: LargeWorld | None

    def gloo(
        self, wanted: WantedGroup, store: Store | None, *, joined: Joined | None = None
    ) -> Any:
        """Return a gloo group; of few ranks once all came, of many without waiting for them.

        They meet in ``store``. In a large world they do not use it: few ranks meet at the first
        one's point, and of many each keeps its key at its own. ``joined`` is the collective for
        which all ranks form it. Raises ``GenerationOverError`` if the generation is over.
        """

        def form() -> Any:
            if self.large is not None:
                return self._large(wanted, self.large)
            assert store is not None
            return self._connected(wanted, store)

        return self.guard.call(form, name="form-group", joined=joined)

    def _large(self, wanted: WantedGroup, large: LargeWorld) -> Any:
        if wanted.eager or len(wanted.ranks) <= large.scale.many:
            with large.points.at(wanted.ranks[0], wanted.name) as store:
                return self._connected(wanted, store)
        keys = large.points.keys(wanted.name, ranks=wanted.ranks, index=wanted.index)
        return LazyGloo(self._made(wanted, keys, lazy=True), keys)

    def _connected(self, wanted: WantedGroup, store: Store) -> Any:
        exchange = RankExchange(store, rank=wanted.index, size=len(wanted.ranks))
        return self._made(wanted, exchange)

    def _made(self, wanted: WantedGroup, store: Store, *, lazy: bool = False) -> Any:
        return torch_private.gloo_group(
            store,
            wanted.index,
            len(wanted.ranks),
            host=self.host,
            timeout=wanted.timeout,
            lazy=lazy,
        )
