"""Batch samplers that record an epoch's order and skip its beginning. They know no torch."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from holdfast.ckpt import MismatchError, StateError


@dataclass(frozen=True, slots=True)
class OrderMark:
    """The numbers of batches and samples up to one batch, and the checksum of those samples."""

    batches: int
    samples: int
    checksum: int


class WatchedBatchSampler:
    """A batch sampler that yields another one's batches and keeps a mark after each of them.

    ``name`` is that of the loader in messages.
    """

    def __init__(self, sampler: Any, name: str) -> None:
        self._sampler, self._name = sampler, name
        self._marks: deque[OrderMark] = deque([OrderMark(0, 0, 0)])
        self._skip, self._expected, self._is_end = 0, OrderMark(0, 0, 0), False
        self.skipped_batches = 0

    def go_on_once(self, *, skip: int, samples: int, checksum: int, is_end: bool) -> None:
        """Have the next iteration leave out the first ``skip`` samples, and check the order.

        The first ``samples`` must have ``checksum``; if ``is_end``, none may follow them.
        """
        self._skip, self._is_end = skip, is_end
        self._expected = OrderMark(0, samples, checksum)

    def __iter__(self) -> Iterator[Any]:
        skip, expected, is_end = self._skip, self._expected, self._is_end
        self._skip, self._expected, self._is_end = 0, OrderMark(0, 0, 0), False
        mark = OrderMark(0, 0, 0)
        self._marks, self.skipped_batches = deque([mark]), 0
        for batch in self._sampler:
            before, mark = mark, _after(mark, batch)
            self._check_order(before, mark, expected, is_end=is_end)
            self._marks.append(mark)
            if mark.samples <= skip:
                self.skipped_batches = mark.batches
                continue
            if before.samples < skip:
                raise StateError(
                    f"{self._name}: sample {skip}, at which the checkpoint was saved, lies inside "
                    f"a batch of samples {before.samples} to {mark.samples}: give a batch size "
                    f"that divides {skip}, or begin the epoch anew by load(data=False)"
                )
            yield batch
        if mark.samples < expected.samples:
            self._refuse(expected)

    def _check_order(
        self, before: OrderMark, mark: OrderMark, expected: OrderMark, *, is_end: bool
    ) -> None:
        here = mark.samples == expected.samples and mark.checksum != expected.checksum
        beyond = is_end and before.samples == expected.samples
        if expected.samples and (here or beyond):
            self._refuse(expected)

    def _refuse(self, expected: OrderMark) -> None:
        raise MismatchError(
            f"{self._name}: the {expected.samples} samples before the position are others than at "
            "the save. Give the same data set and sampler; a sampler of your own draws from a "
            "torch.Generator in its attribute `generator`, or before its first sample from the "
            "global generators. Or begin the epoch anew by load(data=False)"
        )

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def mark(self, batches: int | None) -> OrderMark:
        """Return the mark after so many batches; None: the last one so far.

        Earlier marks are dropped.
        """
        while len(self._marks) > 1 and (batches is None or self._marks[0].batches < batches):
            self._marks.popleft()
        return self._marks[0]


class SkippingBatchSampler:
    """A batch sampler that leaves out another one's first batches, once."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._skip: int | None = 0
        self._then: Callable[[], None] | None = None

    def skip_once(self, batches: int | None, then: Callable[[], None]) -> None:
        """Have the next iteration leave out so many batches (None: all), and call ``then``."""
        self._skip, self._then = batches, then

    def __iter__(self) -> Iterator[Any]:
        skip, then, self._skip, self._then = self._skip, self._then, 0, None
        batches = iter(self._sampler)
        if skip is None:
            deque(batches, maxlen=0)
        else:
            for _ in range(skip):
                next(batches, None)
        if then is not None:
            then()
        yield from batches

    def __len__(self) -> int:
        assert isinstance(self._sampler, Sized)
        return len(self._sampler)


def _after(mark: OrderMark, batch: Any) -> OrderMark:
    indices = batch if isinstance(batch, list | tuple) else (batch,)
    text = ",".join(map(_text, indices))
    checksum = crc32(f"{text},".encode(), mark.checksum)
    return OrderMark(mark.batches + 1, mark.samples + len(indices), checksum)


def _text(index: Any) -> str:
    """Return an index as text, the same for all types of integers."""
    try:
        return str(operator.index(index))
    except TypeError:
        return repr(index)
