"""A loader of the samples that the logbook of a sea deals to this island."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from holdfast.ckpt.types import Json
from holdfast.elastic.data.hand import Hand
from holdfast.elastic.data.loaders import LoaderContext, MapLoader, as_kind
from holdfast.elastic.data.options import Loading
from holdfast.elastic.data.plan import PlannedMicrobatch, Step
from holdfast.elastic.data.workers.feed import Feed
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.sea.records import DealtData

_PREFETCHED: Final = 2
"""Batches that torch reads ahead with each process, unless the options say another number."""

_IN_FEED: Final = 2
"""Batches that a feed holds."""


class _DealtState(msgspec.Struct, kw_only=True):
    taken: int
    batch: int
    samples: int
    order: Json


class DealtLoader(MapLoader):
    """A loader of the samples in an island's ``hand``.

    A step has at most ``batch`` of them, of one epoch. Its positions are numbers of samples in the
    island's lineage, not places in an epoch.
    """

    def __init__(
        self, loading: Loading, site: LoaderContext, *, name: str, batch: int | None, hand: Hand
    ) -> None:
        super().__init__(loading, site, name=name, batch=batch)
        self._hand = hand
        self._asked = self._got = self._number = 0
        self._is_dry = False
        described = json.dumps(self._order.describe(), sort_keys=True)
        hand.deal_from(
            DealtData(samples=self._length, order=described, seed=site.seed),
            batch=self.batch,
            ahead=_ahead_of(loading),
        )

    def __len__(self) -> int:
        raise ConfigError(
            f"len() of the loader {self.name!r}: the logbook deals its samples to the islands that "
            "there are, so nobody knows their steps before; loop over run.epochs(...), or give a "
            "schedule a number of your own"
        )

    @property
    def epoch(self) -> int:
        """The epoch of the present step, or of the next one."""
        if self._step is not None:
            return self._step.epoch
        return self._hand.epoch

    def reaches(self, epochs: int) -> bool:
        """Return whether the logbook has no more samples for this island; collective."""
        self._hand.limit(epochs)
        if not self._hand.has_begun:
            return False
        self._hand.refill()
        return self._hand.is_empty

    def _next_step(self) -> Step:
        if (found := self._state()) is not None:
            self._check(as_kind(found, _DealtState, self.name))
        if self._number != self._hand.number:  # what was read ahead is not in this hand
            self.close()
            self._number = self._hand.number
        return self._hand.next_step()

    def _check(self, saved: _DealtState) -> None:
        """Refuse another division: samples that are in the sea would be trained again."""
        here = (self.batch, self._samples, self._order.describe())
        if (saved.batch, saved.samples, saved.order) != here:
            raise ConfigError(
                f"loader {self.name!r} was saved with batch={saved.batch} and {saved.samples} "
                f"samples in the order {saved.order}, now it has batch={self.batch} and "
                f"{self._samples} samples in the order {self._order.describe()}: an island goes on "
                "with the same, because its steps are in the records of the sea; give the same, or "
                "another checkpoint directory"
            )

    def _steps_after(self, step: Step) -> Iterator[Step]:
        return self._hand.steps_after(step)

    def _indices(self, positions: range, epoch: int) -> list[int]:
        return [
            index for part in self._hand.positions(positions) for index in self._of(part, epoch)
        ]

    def _of(self, positions: range, epoch: int) -> list[int]:
        return super()._indices(positions, epoch)

    def _moved(self) -> dict[str, Json]:
        step = self._step
        super()._moved()
        if step is not None:
            self._hand.advance(step.count)
        return {
            "taken": self._hand.taken,
            "batch": self.batch,
            "samples": self._samples,
            "order": self._order.describe(),
        }

    def _after(self, step: int) -> dict[str, Json]:
        raise ConfigError(
            f"loader {self.name!r} cannot begin at step {step}: the logbook of the sea says which "
            "samples an island has trained; begin with the first step, or give "
            "Islands(data='own')"
        )

    # -- the feed: it ends where the hand does, and is opened again when there is more -------------

    def _open(self) -> Feed:
        self._asked = self._got = 0
        self._is_dry = False
        return super()._open()

    def _ahead(self) -> Iterator[PlannedMicrobatch]:
        parts = super()._ahead()
        part = next(parts, None)
        while part is not None:
            following = next(parts, None)
            self._asked += 1
            self._is_dry = following is None  # before the last one is given
            yield part
            part = following

    def _get(self) -> Any:
        if self._feed is not None and self._is_dry and self._got == self._asked:
            self.close()
        found = super()._get()
        self._got += 1
        return found


def _ahead_of(loading: Loading) -> int:
    """Return for how many steps a rank's processes may read ahead."""
    if not loading.workers:
        return 0
    each = loading.options.get("prefetch_factor") or _PREFETCHED
    return loading.workers * int(each) + _IN_FEED
