"""Prepared data loaders whose position is known and can be taken up again.

A prepared loader has the torch loader that it iterates as ``base_dataloader``. A `RecordedLoader`
takes its place. It counts batches, and remembers the random states from which the order of the
epoch, and the batch that was fetched ahead, follow.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
)
from torch.utils.data import IterableDataset

from holdfast.adapters.accelerate.positions import (
    LoaderPosition,
    LoaderShares,
    SkipPlan,
    plan_skip,
)
from holdfast.adapters.accelerate.samplers import SkippingBatchSampler, WatchedBatchSampler
from holdfast.adapters.shared.random_states import GlobalRandomness
from holdfast.ckpt import StateError


@dataclass(slots=True, kw_only=True)
class _Epoch:
    """An iteration of a loader: the random states before it, and the progress.

    ``fetched`` counts the batches of this process; prepared loaders are one ahead of the loop.
    """

    number: int
    order: dict[str, Any]
    begin: GlobalRandomness
    begun_at: int = 0
    fetched: int = 0
    before_fetch: GlobalRandomness | None = None
    is_exhausted: bool = False

    @property
    def batches(self) -> int:
        """The batches that the loop has got."""
        return self.fetched if self.is_exhausted else max(self.fetched - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resumption:
    """The place at which the next iteration goes on, and the random states that belong to it.

    ``now`` has the states of the save until the first of all loaders goes on.
    """

    position: LoaderPosition
    plan: SkipPlan
    begin: GlobalRandomness
    before_fetch: GlobalRandomness | None
    now: list[GlobalRandomness]


class RecordedLoader:
    """The torch loader of a prepared loader, with a record of its position.

    ``name`` is that of the loader in messages, ``device`` the one of this process. Raises
    ``StateError`` for a loader whose position cannot be kept.
    """

    def __init__(self, loader: Any, *, name: str, device: torch.device) -> None:
        _check(loader, name)
        self._loader, self._name, self._device = loader, name, device
        self._base = loader.base_dataloader
        self.shares = _shares(self._base)
        self._nodes = _nodes(self._base)
        _own_generator(self._nodes["sampler"])
        self._copy = copy.copy(self._base)
        vars(self._copy)["_iterator"] = None
        self._watched: WatchedBatchSampler | None = None
        self._skipping: SkippingBatchSampler | None = None
        if not isinstance(self._base.dataset, IterableDataset):
            self._watch()
        self._epoch: _Epoch | None = None
        self._resumption: _Resumption | None = None
        loader.base_dataloader = self

    def _watch(self) -> None:
        """Put the recording and the skipping samplers into the copy of the loader."""
        key = "sampler" if self._base.batch_sampler is None else "batch_sampler"
        found = getattr(self._base, key)
        if isinstance(found, BatchSamplerShard):
            outer = copy.copy(found)
            outer.batch_sampler = self._watched = WatchedBatchSampler(
                found.batch_sampler, self._name
            )
        else:
            outer = self._watched = WatchedBatchSampler(found, self._name)
        self._skipping = SkippingBatchSampler(outer)
        vars(self._copy)[key] = self._skipping  # DataLoader refuses to set it after its __init__

    def __getattr__(self, name: str) -> Any:
        if name == "_base":
            raise AttributeError(name)
        return getattr(self._base, name)

    # Prepared loaders show the class of this object, by which accelerate knows a DataLoader.
    __class__ = property(lambda self: type(self._base))

    def __len__(self) -> int:
        return len(self._base)

    def __iter__(self) -> Iterator[Any]:
        resumption, self._resumption = self._resumption, None
        if resumption is not None and self._loader.iteration != resumption.position.epoch:
            raise StateError(
                f"{self._name}: the loop begins epoch {self._loader.iteration}, the checkpoint is "
                f"in epoch {resumption.position.epoch}: begin the loop over epochs at "
                "`loader.iteration`, which load() has set"
            )
        epoch = _Epoch(
            number=self._loader.iteration,
            order=self._order(),
            begin=resumption.begin if resumption else GlobalRandomness.taken(self._device),
        )
        self._epoch = epoch
        return self._resumed(epoch, resumption) if resumption else self._batches(epoch)

    def _batches(self, epoch: _Epoch) -> Iterator[Any]:
        try:
            yield from self._fetched(epoch, iter(self._copy))
        except GeneratorExit:
            self._leave(epoch)
            raise

    def _resumed(self, epoch: _Epoch, resumption: _Resumption) -> Iterator[Any]:
        """Yield the batches after a position, fetched under the random states they had."""
        plan, saved = resumption.plan, resumption.now
        # draws between load() and the loop do not count; those of a loader that went on before do
        now = saved.pop() if saved else GlobalRandomness.taken(self._device)
        resumption.begin.put_back(self._device)

        def skipped() -> None:
            if resumption.before_fetch is not None:
                resumption.before_fetch.put_back(self._device)

        epoch.begun_at = plan.samples
        if self._watched is not None and self._skipping is not None:
            self._watched.go_on_once(
                skip=plan.samples,
                samples=resumption.position.samples,
                checksum=resumption.position.checksum,
                is_end=resumption.position.is_over,
            )
            self._skipping.skip_once(plan.batches, skipped)
        try:
            batches = iter(self._copy)
            if self._watched is None:
                _read_over(batches, plan.batches)
                skipped()
            epoch.fetched = plan.batches or 0
            first = [] if plan.batches is None else [*self._one(epoch, batches, resumption)]
            if plan.batches is None and self._watched is not None:
                next(batches, None)
            now.put_back(self._device)
            yield from first
            yield from self._fetched(epoch, batches)
            if epoch.fetched == 0:
                epoch.fetched = resumption.position.batches
                self._loader.iteration += 1  # accelerate counts no epoch without a batch
        except GeneratorExit:
            self._leave(epoch)
            raise

    def _one(self, epoch: _Epoch, batches: Iterator[Any], resumption: _Resumption) -> Iterator[Any]:
        """Yield the first batch after a position, if there is one."""
        for batch in batches:
            epoch.before_fetch = resumption.before_fetch
            epoch.fetched += 1
            yield batch
            return
        epoch.is_exhausted = True

    def _fetched(self, epoch: _Epoch, batches: Iterator[Any]) -> Iterator[Any]:
        alone = self._base.num_workers == 0
        while not epoch.is_exhausted:
            before = GlobalRandomness.taken(self._device) if alone else None
            try:
                batch = next(batches)
            except StopIteration:
                epoch.is_exhausted = True
                return
            epoch.fetched, epoch.before_fetch = epoch.fetched + 1, before
            if self._watched is not None:
                self._watched.mark(self._consumed(epoch.batches))  # drops the earlier ones
            yield batch

    def _leave(self, epoch: _Epoch) -> None:
        """Forget an iteration that the loop has left before its end."""
        if self._epoch is epoch and not epoch.is_exhausted:
            self._epoch = None

    def _consumed(self, batches: int) -> int:
        """Return the batches of the common order that went into so many of each process."""
        assert self._watched is not None
        times = 1 if self.shares.is_split else self.shares.processes
        return self._watched.skipped_batches + batches * times

    def _running(self) -> _Epoch | None:
        """Return the epoch that has begun and is not over, None between two."""
        epoch = self._epoch
        if epoch is None or epoch.number != self._loader.iteration:
            return None
        return epoch if epoch.batches or epoch.begun_at or epoch.is_exhausted else None

    @property
    def position(self) -> LoaderPosition:
        """The present position; after the last batch of an epoch, the beginning of the next."""
        if self._resumption is not None:
            return self._resumption.position
        has_order = self._watched is not None
        if (epoch := self._running()) is None:
            return LoaderPosition(
                epoch=self._loader.iteration, has_order=has_order, shares=self.shares
            )
        samples = checksum = 0
        if self._watched is not None:
            consumed = None if epoch.is_exhausted else self._consumed(epoch.batches)
            mark = self._watched.mark(consumed)
            samples, checksum = mark.samples, mark.checksum
        return LoaderPosition(
            epoch=epoch.number,
            batches=epoch.batches,
            begun_at=epoch.begun_at,
            samples=samples,
            checksum=checksum,
            has_order=has_order,
            is_over=epoch.is_exhausted,
            shares=self.shares,
        )

    def rank_state(self) -> dict[str, Any]:
        """Return the state that belongs to this rank: random states as trees."""
        begin: GlobalRandomness | None = None
        before: GlobalRandomness | None = None
        order = self._order()
        if (waiting := self._resumption) is not None:
            begin, before = waiting.begin, waiting.before_fetch
        elif (epoch := self._running()) is not None:
            begin, order = epoch.begin, epoch.order
            before = None if epoch.is_exhausted else epoch.before_fetch
        return {
            "order": order,
            "begin": None if begin is None else begin.saved(),
            "fetch": None if before is None else before.saved(),
        }

    def go_on(
        self,
        position: LoaderPosition,
        rank_state: Mapping[str, Any],
        *,
        now: list[GlobalRandomness],
    ) -> None:
        """Have the next iteration begin at a position; all loaders get the same list ``now``.

        Raises ``StateError`` if the loader cannot skip to it.
        """
        plan = plan_skip(position, self.shares, name=self._name)
        if plan is not None and position.has_order != (self._watched is not None):
            raise StateError(
                f"{self._name}: an iterable data set and one that can be indexed do not follow "
                "each other inside an epoch: begin the epoch anew by load(data=False)"
            )
        self._set_order(rank_state["order"])
        self._loader.iteration, self._epoch, self._resumption = position.epoch, None, None
        if isinstance(sampler := self._nodes["sampler"], SeedableRandomSampler):
            sampler.epoch = position.epoch
        if plan is not None and rank_state["begin"] is not None:
            fetch = rank_state["fetch"]
            self._resumption = _Resumption(
                position=position,
                plan=plan,
                begin=GlobalRandomness.of_saved(rank_state["begin"]),
                before_fetch=None if fetch is None else GlobalRandomness.of_saved(fetch),
                now=now,
            )

    def generators(self) -> list[torch.Generator]:
        """Return the generators from which the order of samples is drawn."""
        return list(_generators(self._nodes).values())

    def _order(self) -> dict[str, Any]:
        """Return the states from which the next epoch's order follows."""
        sampler = self._nodes["sampler"]
        if isinstance(sampler, SeedableRandomSampler):
            return {"seed": sampler.initial_seed}
        return {name: each.get_state() for name, each in _generators(self._nodes).items()}

    def _set_order(self, saved: Mapping[str, Any]) -> None:
        sampler = self._nodes["sampler"]
        if isinstance(sampler, SeedableRandomSampler) != ("seed" in saved):
            raise StateError(
                f"{self._name}: use_seedable_sampler is not as it was at the save: give "
                "DataLoaderConfiguration the same value, or begin the epoch anew by "
                "load(data=False)"
            )
        if isinstance(sampler, SeedableRandomSampler):
            sampler.initial_seed = saved["seed"]
            return
        for name, generator in _generators(self._nodes).items():
            if name in saved:
                generator.set_state(saved[name])


def _check(loader: Any, name: str) -> None:
    # type(), because a prepared loader shows the class of the torch loader in it
    kind = type(loader)
    if issubclass(kind, DataLoaderDispatcher):
        raise StateError(
            f"{name}: the main process dispatches its batches, and the position of such a loader "
            "is not kept: give Accelerator "
            "dataloader_config=DataLoaderConfiguration(dispatch_batches=False)"
        )
    if not issubclass(kind, DataLoaderShard):
        raise StateError(f"{name}: a {kind.__name__} is not supported; give a torch DataLoader")
    if loader.use_stateful_dataloader:
        raise StateError(
            f"{name}: leave use_stateful_dataloader out: the checkpoint has the position of every "
            "prepared loader, and the order of its samples"
        )


def _shares(base: Any) -> LoaderShares:
    """Return the way in which a torch loader's batches are shared out among the processes."""
    dataset, processes = base.dataset, PartialState().num_processes
    if isinstance(dataset, IterableDatasetShard):
        return LoaderShares(
            processes=dataset.num_processes,
            batch_size=dataset.batch_size,
            is_split=dataset.split_batches,
        )
    if isinstance(dataset, IterableDataset):  # one that is divided by itself has other orders
        size = base.batch_size if processes == 1 else None
        return LoaderShares(processes=processes, batch_size=size, is_split=False)
    found = base.sampler if base.batch_sampler is None else base.batch_sampler
    if isinstance(found, BatchSamplerShard):
        size = getattr(found.batch_sampler, "batch_size", None)
        return LoaderShares(
            processes=found.num_processes, batch_size=size, is_split=found.split_batches
        )
    size = getattr(found, "batch_size", None)
    return LoaderShares(processes=1, batch_size=size, is_split=False)


def _nodes(base: Any) -> dict[str, Any]:
    """Return the objects behind a torch loader that may have a generator, by their role."""
    batch_sampler = base.sampler if base.batch_sampler is None else base.batch_sampler
    while isinstance(batch_sampler, BatchSamplerShard):
        batch_sampler = batch_sampler.batch_sampler
    dataset = base.dataset
    if isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    sampler = getattr(batch_sampler, "sampler", batch_sampler)
    return {"loader": base, "batch_sampler": batch_sampler, "sampler": sampler, "dataset": dataset}


def _own_generator(sampler: Any) -> None:
    """Give a sampler that draws from torch's global generator one of its own.

    Accelerate does the same if there are several processes.
    """
    if isinstance(sampler, SeedableRandomSampler) or getattr(sampler, "generator", 0) is not None:
        return
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    sampler.generator = torch.Generator().manual_seed(seed)


def _generators(nodes: Mapping[str, Any]) -> dict[str, torch.Generator]:
    found: dict[str, torch.Generator] = {}
    for name in ("sampler", "batch_sampler", "loader", "dataset"):
        each = getattr(nodes[name], "generator", None)
        if isinstance(each, torch.Generator) and not any(each is one for one in found.values()):
            found[name] = each
    return found


def _read_over(batches: Iterator[Any], count: int | None) -> None:
    """Read so many batches of an iterable data set and drop them; None: all."""
    if count is None:
        for _ in batches:
            pass
        return
    for _ in range(count):
        next(batches, None)
