"""The queue of a group's checkpoints: one being written, at most one waiting. Pure.

The node of rank 0 decides for all, so that every node writes the same ones. Only the newest waits:
one that is superseded while it waits is skipped, and training continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.ckpt.sidecar.core.book import SnapshotKey
from holdfast.ckpt.types import Json

_ENDED_KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginWriting:
    """Every node writes its packs of this checkpoint now."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A newer checkpoint is due before this one could begin."""

    key: SnapshotKey
    newer: SnapshotKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Every rank's pack is on the store: publish the manifest."""

    key: SnapshotKey
    receipts: tuple[Json, ...]


Decision: TypeAlias = BeginWriting | Skip | Complete


@dataclass(slots=True, kw_only=True)
class _Due:
    ranks: int
    receipts: dict[int, Json] = field(default_factory=dict)


class Queue:
    """The checkpoints of one generation, at the node that commits them."""

    def __init__(self) -> None:
        self.active: SnapshotKey | None = None
        self.waiting: SnapshotKey | None = None
        self._due: dict[SnapshotKey, _Due] = {}
        self._ended: deque[SnapshotKey] = deque(maxlen=_ENDED_KEPT)

    def due(
        self, key: SnapshotKey, *, ranks: int, receipts: Mapping[int, Json] | None = None
    ) -> list[Decision]:
        """Add a checkpoint of ``ranks`` ranks; some of their packs may be on the store already."""
        if key in self._due or key in self._ended:
            return []
        self._due[key] = _Due(ranks=ranks, receipts=dict(receipts or {}))
        if self.active is None:
            return self._begin(key)
        older, self.waiting = self.waiting, key
        if older is None:
            return []
        if older > key:
            older, self.waiting = key, older
        self._close(older)
        return [Skip(key=older, newer=self.waiting)]

    def receive(self, key: SnapshotKey, rank: int, receipt: Json) -> list[Decision]:
        """Record that a rank's pack is on the store; late and repeated messages change nothing."""
        due = self._due.get(key)
        if due is None or rank in due.receipts:
            return []
        due.receipts[rank] = receipt
        return self._complete(key) if key == self.active else []

    def end(self, key: SnapshotKey) -> list[Decision]:
        """Record that a checkpoint is durable, or will never be; the waiting one begins."""
        self._close(key)
        if key == self.waiting:
            self.waiting = None
        if key != self.active:
            return []
        self.active = None
        following, self.waiting = self.waiting, None
        return [] if following is None else self._begin(following)

    def _begin(self, key: SnapshotKey) -> list[Decision]:
        self.active = key
        return [BeginWriting(key=key), *self._complete(key)]

    def _complete(self, key: SnapshotKey) -> list[Decision]:
        due = self._due[key]
        if len(due.receipts) < due.ranks:
            return []
        receipts = tuple(receipt for _, receipt in sorted(due.receipts.items()))
        return [Complete(key=key, receipts=receipts)]

    def _close(self, key: SnapshotKey) -> None:
        self._due.pop(key, None)
        self._ended.append(key)
