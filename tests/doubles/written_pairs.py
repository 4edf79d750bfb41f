"""The files of a small sea whose islands meet in pairs, as they would leave them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from doubles.written_seas import PARAMETERS, SETTINGS
from holdfast import ckpt
from holdfast.ckpt.state.local_boxes import Leaf
from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.islands.mailbox import Mailbox, digest_of
from holdfast.elastic.sea import gossip
from holdfast.elastic.sea.portions import last_of, merges_of, portions_of
from holdfast.elastic.sea.records import (
    Entered,
    Founded,
    Left,
    Merged,
    Part,
    Record,
    Work,
    agreed,
    encode,
)
from holdfast.elastic.sea.view import View
from holdfast.tools.islands.replayed_sea import ReplayedSea

ISLANDS: Final = ("bari", "lyon", "oslo")
PAIRS: Final = replace(SETTINGS, topology="pairs")


class WrittenPairs:
    """Three islands, whose weights are zeros at first; one is odd at each tide."""

    def __init__(self, root: Path) -> None:
        self.store, self.view = LocalStore(root), View()
        self.box, self._numbers = Mailbox(self.store), np.random.default_rng(7)
        founded = Founded(number=0, settings=agreed(PAIRS), parameters=PARAMETERS, digest="0" * 32)
        self.truth = {name: ReplayedSea(founded) for name in ISLANDS}
        first = self.truth["bari"].digest_of_weights()
        self.append(msgspec.structs.replace(founded, digest=first))
        for number, island in enumerate(ISLANDS, start=1):
            self.append(Entered(number=number, island=island, tide=0, weight=10, lineage=number))

    def append(self, record: Record) -> None:
        """Write the next record."""
        self.view = self.view.after(record)
        name = f"logbook/{record.number:08d}.json"
        assert self.store.replace(name, encode(record), expected=None)

    def part(self, island: str, portion: int, *, last: bool = False) -> Part:
        """Publish a work of an island, of random progress."""
        truth, bits, tide = self.truth[island], PAIRS.bits, self.view.members[island].tide
        counts = [int(np.prod(each.shape)) for each in PARAMETERS]
        names = [PARAMETERS[at].name for at in portions_of(counts, PAIRS.portions)[portion]]
        data = b"".join(self._payload(truth.weights[name], bits) for name in names)
        work = Work(
            island=island,
            lineage=self.view.members[island].lineage,
            tide=tide,
            portion=last_of(portion, portions=PAIRS.portions) if last else portion,
            weight=40,
            digest=digest_of(data),
            nbytes=len(data),
            base=merges_of(portion, tide, portions=PAIRS.portions),
            state=truth.digest(portion),
        )
        return self.box.publish(work, data).part

    def _payload(self, leaf: Leaf, bits: int) -> bytes:
        weights = np.asarray(leaf).reshape(-1)
        own = self._numbers.standard_normal(len(weights)).astype(np.float32)
        return gossip.encode(own, weights, bits)

    def meet(self) -> None:
        """Have every island meet once."""
        tide = self.view.oldest
        for island in ISLANDS:
            if self.view.members[island].tide != tide:
                continue
            portion = tide % PAIRS.portions
            names = sorted(self.view.awaited(island))
            parts = tuple(self.part(name, portion) for name in names)
            record = Merged(
                number=self.view.length,
                tide=tide,
                portion=portion,
                parts=parts,
                whole=40 * len(parts),
            )
            payloads = [self.box.payload(each.island, each.digest) for each in parts]
            for own, name in enumerate(names):
                self.truth[name].meet(record, payloads, own=own)
            self.append(record)

    def end(self) -> None:
        """Have every island end, and the last one save the weights."""
        for island in ISLANDS:
            parts = tuple(self.part(island, p, last=True) for p in range(PAIRS.portions))
            self.append(Left(number=self.view.length, island=island, why="done", last=parts))
        last = [self.view.former[name].last for name in ISLANDS]
        sea = self.truth["bari"]
        sea.merge_last(
            list(zip(*last, strict=True)), lambda part: self.box.payload(part.island, part.digest)
        )
        ckpt.save(self.store.where("weights"), dict(sea.weights), step=24)
