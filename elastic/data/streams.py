"""Iterable data sets, split into one shard per microbatch of a step; each has its state.

Shard ``m`` feeds microbatch ``m``, on whichever rank that runs. The data set sees itself as worker
``m`` of ``M`` (``torch.utils.data.get_worker_info``), which iterable data sets already use to
divide themselves. The state of a shard travels with the batch it belongs to. So samples that a
worker process only read ahead are dropped with it, and read again from the state after the last
trained batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import StateError
from holdfast.ckpt.state import plain
from holdfast.ckpt.state.flatten import decode_small_tensor, encode_small_tensor
from holdfast.ckpt.state.trees.stateful import Stateful
from holdfast.ckpt.types import Json
from holdfast.elastic import randomness
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.seeding import seed_host

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The common plan of all shards of an epoch; shard ``m`` gives ``sizes[m]`` samples a step.

    There are as many microbatches as sizes.
    """

    seed: int
    epoch: int
    sizes: tuple[int, ...]


@dataclass(slots=True)
class ShardStep:
    """One shard's batch for one step, and its state afterwards."""

    microbatch: int
    count: int
    batch: Any
    state: Json

    def pin_memory(self) -> ShardStep:
        """Return the same with its tensors in pinned memory; a DataLoader calls this."""
        return ShardStep(self.microbatch, self.count, torch_private.pinned(self.batch), self.state)


class Shard:
    """One shard of a data set, from a given state, or from its beginning.

    A data set (or its iterator) with ``state_dict`` and ``load_state_dict`` is restored in
    torchdata's order: the data set, then its iterator. One without is read again from the
    beginning, and trained samples are dropped. Raises ``ConfigError`` if the data set cannot be
    copied or its state is not plain.
    """

    def __init__(
        self, dataset: Any, microbatch: int, *, plan: ShardPlan, state: Json = None
    ) -> None:
        self.microbatch, self._plan = microbatch, plan
        self._dataset = _copy(dataset)
        self._draws, self._ended = 0, False
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(plan.epoch)
        saved = {} if state is None else plain.decode(state, leaf=decode_small_tensor)
        with self._as_worker():
            if "dataset" in saved:
                self._dataset.load_state_dict(saved["dataset"])
            self._begin()
            self._iterator = iter(self._dataset)
            if "iterator" in saved:
                self._iterator.load_state_dict(saved["iterator"])
        if saved.keys() & {"dataset", "iterator"}:
            self._draws, self._ended = saved["draws"], saved["ended"]
        else:
            for _ in range(saved.get("draws", 0)):
                self.draw()

    def _as_worker(self) -> AbstractContextManager[None]:
        plan = self._plan
        return torch_private.as_data_worker(
            worker=self.microbatch,
            workers=len(plan.sizes),
            seed=randomness.stream_seed(plan.seed, "shard", plan.epoch, self.microbatch),
            dataset=self._dataset,
        )

    def _begin(self) -> None:
        plan = self._plan
        numbers = plan.epoch, self.microbatch, self._draws
        seed_host(randomness.stream_seed(plan.seed, "stream", *numbers))

    def draw(self) -> list[Any]:
        """Return the samples of the next step; fewer when the shard ends, then none."""
        if self._ended:
            return []
        with self._as_worker():
            self._begin()
            samples = list(islice(self._iterator, self._plan.sizes[self.microbatch]))
        self._draws += 1
        # Kept apart from the data set's state: at their end many data sets restart by themselves.
        self._ended = len(samples) < self._plan.sizes[self.microbatch]
        return samples

    def state(self) -> Json:
        """Return the shard's position, as JSON."""
        saved: dict[str, Any] = {"draws": self._draws, "ended": self._ended}
        if isinstance(self._dataset, Stateful):
            saved["dataset"] = self._dataset.state_dict()
        if self._iterator is not self._dataset and isinstance(self._iterator, Stateful):
            saved["iterator"] = self._iterator.state_dict()
        try:
            return plain.encode(saved, "state_dict()", leaf=encode_small_tensor)
        except StateError as error:
            raise ConfigError(f"the state of the iterable data set: {error}") from error


class Shards(IterableDataset[list[ShardStep]]):
    """A rank's shards, for a DataLoader: each of its processes yields one list of rows a step."""

    def __init__(
        self,
        dataset: Any,
        mine: Sequence[int],
        *,
        plan: ShardPlan,
        states: Mapping[int, Json],
        collate: Collate,
    ) -> None:
        self._dataset, self._mine, self._plan = dataset, tuple(mine), plan
        self._states, self._collate = dict(states), collate

    def __iter__(self) -> Iterator[list[ShardStep]]:
        info = get_worker_info()
        mine = self._mine if info is None else self._mine[info.id :: info.num_workers]
        shards = [Shard(self._dataset, m, plan=self._plan, state=self._states.get(m)) for m in mine]
        while True:  # past the end too: an epoch is over only when all shards are
            yield [self._row(shard) for shard in shards]

    def _row(self, shard: Shard) -> ShardStep:
        samples = shard.draw()
        batch = self._collate(samples) if samples else None
        return ShardStep(shard.microbatch, len(samples), batch, shard.state())


def _copy(dataset: Any) -> Any:
    try:
        return copy.deepcopy(dataset)
    except (TypeError, copy.Error) as error:
        raise ConfigError(
            f"the iterable data set {type(dataset).__name__} cannot be copied, as each of its "
            f"shards has to be ({type(error).__name__}: {error}): open files and connections in "
            "__iter__, not in __init__"
        ) from error
