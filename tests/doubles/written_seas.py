"""The files of a small sea in a directory, as islands would leave them after some merges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.islands.mailbox import Mailbox, digest_of
from holdfast.elastic.islands.messages import LineFigures, Sign
from holdfast.elastic.sea import payload
from holdfast.elastic.sea.portions import portions_of
from holdfast.elastic.sea.records import (
    Entered,
    Founded,
    Left,
    Merged,
    Parameter,
    Record,
    Work,
    agreed,
    encode,
)
from holdfast.elastic.sea.settings import Islands
from holdfast.elastic.sea.view import View
from holdfast.tools.islands.replayed_sea import ReplayedSea

SETTINGS: Final = Islands(every=4, portions=2, overlap=1, bits=8, founders=2)
PARAMETERS: Final = (
    Parameter(name="model.0.weight", shape=(30, 20)),
    Parameter(name="model.0.bias", shape=(30,)),
    Parameter(name="model.2.weight", shape=(7, 30)),
)


class WrittenSea:
    """A sea of islands in step, whose weights are zeros at first."""

    def __init__(self, root: Path, islands: Sequence[str] = ("lyon", "oslo")) -> None:
        self.store, self.islands = LocalStore(root), tuple(islands)
        self.box, self.view, self._beat = Mailbox(self.store), View(), 0
        self._numbers = np.random.default_rng(7)
        counts = [math.prod(each.shape) for each in PARAMETERS]
        self._portions = portions_of(counts, SETTINGS.portions)
        founded = Founded(
            number=0, settings=agreed(SETTINGS), parameters=PARAMETERS, digest="0" * 32
        )
        self.truth = ReplayedSea(founded)
        founded = msgspec.structs.replace(founded, digest=self.truth.digest_of_weights())
        self.append(founded)
        for number, island in enumerate(self.islands, start=1):
            self.append(Entered(number=number, island=island, tide=0, weight=10, lineage=number))

    def disturb(self, portion: int) -> None:
        """Change the truth, as damaged memory would."""
        number = self._portions[portion].start
        leaf = self.truth.weights[PARAMETERS[number].name]
        assert isinstance(leaf, torch.Tensor)
        leaf.view(-1)[0] += 1

    def elements(self, portion: int) -> list[int]:
        """Return the elements of each parameter of a portion."""
        return [math.prod(PARAMETERS[at].shape) for at in self._portions[portion]]

    def append(self, record: Record) -> None:
        """Write the next record."""
        self.view = self.view.after(record)
        name = f"logbook/{record.number:08d}.json"
        assert self.store.replace(name, encode(record), expected=None)

    def publish(self, island: str) -> Work:
        """Publish an island's work for the next merge, of random progress."""
        portion, bits = self.view.portion, SETTINGS.bits
        counts = self.elements(portion)
        data = b"".join(
            payload.encode(self._numbers.standard_normal(n).astype(np.float32), bits)
            for n in counts
        )
        work = Work(
            island=island,
            lineage=self.view.members[island].lineage,
            tide=self.view.tide,
            portion=portion,
            weight=40,
            digest=digest_of(data),
            nbytes=len(data),
            base=self.view.merges(portion),
            state=self.truth.digest(portion),
        )
        return self.box.publish(work, data)

    def merge(self) -> None:
        """Publish the works of all islands, and write and make their merge."""
        works = [self.publish(island) for island in self.islands]
        parts = tuple(work.part for work in works)
        record = Merged(
            number=self.view.length,
            tide=self.view.tide,
            portion=self.view.portion,
            parts=parts,
            whole=self.view.whole(parts),
        )
        self.truth.merge(record, [self.box.payload(each.island, each.digest) for each in parts])
        self.append(record)

    def stir(self, island: str, *, line: LineFigures = LineFigures()) -> None:  # noqa: B008
        """Give a sign of life of an island."""
        self._beat += 1
        self.box.show(
            island,
            Sign(
                island=island,
                run="r",
                number=self._beat,
                needs=0,
                step=1200,
                tide=self.view.tide,
                waiting_s=2.5,
                sent_bytes=3 << 20,
                step_s=0.5,
                line=line,
            ),
        )

    def leave(self, island: str) -> None:
        """Have an island end its run."""
        self.append(Left(number=self.view.length, island=island, why="done"))
