"""Samples of a map-style data set, fetched by index; the same in every process.

A worker process receives a `SampleRequest`: the epoch, which selects the random streams, and the
indices. Every sample is read under a seed of its own, made of (seed, epoch, index). So random
augmentation depends neither on the worker that does it nor on the batch of the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from holdfast.elastic import randomness
from holdfast.elastic.data.plan import PlannedMicrobatch
from holdfast.elastic.seeding import seed_host


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """The samples of one microbatch."""

    epoch: int
    indices: tuple[int, ...]


class SeededSamples(Dataset[Any]):
    """A data set that reads each sample under its own seed; batches come as `SampleRequest`.

    A data set with ``__getitems__`` reads a whole request at once, under the seed of its first
    sample.
    """

    def __init__(self, dataset: Any, *, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, request: SampleRequest) -> list[Any]:
        together = getattr(self._dataset, "__getitems__", None)
        if together is not None:
            self._begin(request.epoch, request.indices[0])
            return list(together(list(request.indices)))
        return [self._one(request.epoch, index) for index in request.indices]

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def _one(self, epoch: int, index: int) -> Any:
        self._begin(epoch, index)
        return self._dataset[index]

    def _begin(self, epoch: int, index: int) -> None:
        seed_host(randomness.stream_seed(self._seed, "sample", epoch, index))


class Requests:
    """The batch sampler given to a DataLoader: this rank's requests, step after step."""

    def __init__(
        self, parts: Iterator[PlannedMicrobatch], indices: Callable[[range, int], list[int]]
    ) -> None:
        self._parts, self._indices = parts, indices

    def __iter__(self) -> Iterator[SampleRequest]:
        for part in self._parts:
            indices = self._indices(part.positions, part.epoch)
            yield SampleRequest(epoch=part.epoch, indices=tuple(indices))
