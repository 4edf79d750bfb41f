"""Evaluation divided among the ranks: each computes some batches, and all see all results.

The Trainer's own loop runs on every rank, over one place for each batch, in order. A round has as
many batches as there are ranks: each rank reads and computes one, and the ranks exchange what came
out. So metrics, and all that follows from them, are computed from the same values in the same order
on every rank, whatever their number. Each batch is read and computed under a seed of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Final

import torch
from accelerate.data_loader import DataLoaderStateMixin
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.adapters.hf.accepted import own_classes
from holdfast.adapters.hf.grpo import is_grpo
from holdfast.adapters.hf.kept import TOTAL, metrics_of
from holdfast.adapters.hf.own_state import OwnState
from holdfast.adapters.shared.random_states import GlobalRandomness, seed_all
from holdfast.ckpt import StateError
from holdfast.elastic import ConfigError, Run, session_of

_CPU: Final = torch.device("cpu")
_APART: Final = 1 << 20
"""Distance of the seeds of two steps, more than an evaluation has batches."""

Compute = Callable[[Any], tuple[Any, Any, Any]]
"""Returns the loss, the logits and the labels of a batch."""


class PlaceOfBatch(dict[str, Any]):
    """The place of a batch in the Trainer's loop: the batch itself only if metrics ask for it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class DividedEvaluation:
    """One evaluation of all ranks over the batches of ``loader``; iterate over it once.

    ``seed`` is that of the first batch.
    """

    def __init__(self, trainer: Any, run: Run, loader: Any, *, seed: int) -> None:
        self._trainer, self._run, self._loader = trainer, run, loader
        self.dataset = loader.dataset
        self._preprocess = trainer.preprocess_logits_for_metrics
        self._needs_inputs = "inputs" in trainer.args.include_for_metrics
        plan = [list(each) for each in loader.batch_sampler]
        self._check(plan)
        self._count = len(plan)
        batches = _Batches(loader.dataset, plan, loader.collate_fn, seed=seed)
        own = range(run.rank, self._count, run.world_size)
        self._seed, self._own = seed, iter(_like(loader, batches, own))
        self._watch = OwnState(trainer)
        self._found: list[Any] = []

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[PlaceOfBatch]:
        if not isinstance(self._loader, DataLoaderStateMixin):
            yield from map(PlaceOfBatch, range(self._count))
            return
        self._loader.begin()
        try:
            for number in range(self._count):
                # The Trainer and compute_metrics ask for it.
                self._loader.end_of_dataloader = number == self._count - 1
                yield PlaceOfBatch(number)
        finally:
            self._loader.end()

    @contextmanager
    def in_loop(self) -> Iterator[None]:
        """Preprocess logits where they are computed, not again in the Trainer's loop."""
        self._trainer.preprocess_logits_for_metrics = None
        try:
            yield
        finally:
            self._trainer.preprocess_logits_for_metrics = self._preprocess

    def step(self, place: PlaceOfBatch, compute: Compute) -> tuple[Any, Any, Any]:
        """Return what came out of a batch; the first one of a round computes this rank's own."""
        size = self._run.world_size
        if place.number % size == 0:
            self._found = self._round(place.number + self._run.rank, compute)
        loss, logits, labels, inputs, metrics = self._found[place.number % size]
        place.update(inputs)
        kept = metrics_of(self._trainer, "eval")
        for name, values in metrics.items():
            kept[name] = values if name == TOTAL else [*kept.get(name, []), *values]
        return loss, logits, labels

    def _round(self, number: int, compute: Compute) -> list[Any]:
        self._run.check()
        mine = self._computed(number, compute) if number < self._count else None
        try:
            return session_of(self._run).exchange(mine, "a batch of the evaluation")
        except StateError as error:
            raise ConfigError(
                f"resilient_trainer: ranks cannot exchange the results of a batch: {error}; "
                "give preprocess_logits_for_metrics, which returns tensors, or "
                "HoldfastArguments(divide_evaluation=False)"
            ) from error

    def _computed(self, number: int, compute: Compute) -> tuple[Any, ...]:
        """Return loss, logits, labels, inputs and the metrics of TRL's trainers of one batch."""
        batch = next(self._own)
        kept = metrics_of(self._trainer, "eval")
        before = dict(kept)
        kept.clear()
        inputs = dict(batch) if self._needs_inputs and isinstance(batch, Mapping) else {}
        with seeded(self._seed + number), self._watch.unchanged():
            loss, logits, labels = compute(batch)
            if logits is not None and self._preprocess is not None:
                logits = self._preprocess(logits, labels)
        metrics = {name: list(values) for name, values in kept.items()}
        kept.clear()
        kept.update(before)
        return loss, logits, labels, inputs, metrics

    def _check(self, plan: list[Any]) -> None:
        """Raise ``ConfigError`` on all ranks unless they have the same batches."""
        digest = sha256(repr(plan).encode()).hexdigest()
        if len(set(session_of(self._run).exchange(digest, "the batches"))) > 1:
            raise ConfigError(
                "resilient_trainer: the ranks have different evaluation batches: give a data set "
                "and a sampler that are alike on all ranks, or "
                "HoldfastArguments(divide_evaluation=False)"
            )


def divides(trainer: Any, loader: Any) -> bool:
    """Return whether ranks divide an evaluation over ``loader``.

    Its batches must be known before they are read, and the loop over them must be the Trainer's.
    """
    own = own_classes(type(trainer))
    return (
        trainer.holdfast.divide_evaluation
        and isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and not any("evaluation_loop" in vars(each) for each in own)
        and not (own and is_grpo(trainer))  # its own attributes change with every batch
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of the CPU for the body; then they are as before."""
    before = GlobalRandomness.taken(_CPU)
    seed_all(seed)
    try:
        yield
    finally:
        before.put_back(_CPU)


def seed_of(trainer: Any) -> int:
    """Return the seed of an evaluation at the present step, alike on every rank."""
    return int(trainer.args.seed + trainer.state.global_step * _APART) % (1 << 62)


class _Batches(Dataset[Any]):
    """Whole batches by number; each is read and collated under its own seed, also in a worker."""

    def __init__(
        self, dataset: Any, plan: list[list[Any]], collate: Callable[[list[Any]], Any], *, seed: int
    ) -> None:
        self._dataset, self._plan, self._collate, self._seed = dataset, plan, collate, seed

    def __getitem__(self, number: int) -> Any:
        with seeded(self._seed + number):
            return self._collate(self._samples(self._plan[number]))

    def _samples(self, indices: list[Any]) -> list[Any]:
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(indices))
        return [self._dataset[index] for index in indices]


def _like(loader: DataLoader[Any], batches: _Batches, numbers: range) -> DataLoader[Any]:
    """Return a loader of some whole batches, with the workers that another one has."""
    return DataLoader(
        batches,
        batch_size=None,
        sampler=numbers,
        collate_fn=_same,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
    )


def _same(batch: Any) -> Any:
    return batch
