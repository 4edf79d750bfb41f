"""Loading options: the arguments of `Run.loader`, checked, or taken over from a DataLoader."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
)

from holdfast.ckpt import checks
from holdfast.elastic.data.order import SampleOrder, Sequential, Shuffled, Weighted
from holdfast.elastic.data.samplers import SamplerOrder
from holdfast.elastic.data.workers.feed import FIRST_BATCH_S
from holdfast.elastic.errors import ConfigError

_OURS = {
    "batch_size": "give batch=, the samples of a whole step",
    "batch_sampler": "give order=",
    "sampler": "give order=",
    "drop_last": "nothing is dropped: the last step of an epoch is smaller",
    "generator": "samples are seeded by the run",
}
_READ_OFF = (
    "collate_fn",
    "multiprocessing_context",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
)

_RULES: Final[Mapping[str, checks.Rule]] = {
    "first_batch_s": checks.number(0, math.inf, above=True, remedy="give seconds above 0"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A data set, the order of its samples (None: its own) and how they are loaded.

    ``options`` go to ``factory``, which is DataLoader or takes the same arguments. ``size`` is the
    number of samples in a microbatch if no ``batch`` is given. A worker process may take
    ``first_batch_s`` until its first batch.
    """

    dataset: Any
    order: SampleOrder | None
    factory: Callable[..., DataLoader[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    size: int
    first_batch_s: float = FIRST_BATCH_S

    def __post_init__(self) -> None:
        given = {"first_batch_s": self.first_batch_s}
        checks.check("run.loader", given, _RULES, error=ConfigError)
        for name, remedy in _OURS.items():
            if name in self.options:
                raise ConfigError(f"run.loader({name}=...) is not among its options: {remedy}")

    @property
    def workers(self) -> int:
        """The number of a rank's worker processes; with none the rank loads by itself."""
        return int(self.options.get("num_workers", 0))

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """The function that makes a batch of samples."""
        return self.options.get("collate_fn") or default_collate


def loading_of(
    dataset: Any,
    *,
    size: int,
    shuffle: bool | None,
    order: SampleOrder | Iterable[int] | None,
    factory: Callable[..., DataLoader[Any]],
    options: Mapping[str, Any],
) -> Loading:
    """Return the loading options of ``dataset``, or of a DataLoader's data set.

    Raises ``ConfigError`` for options that contradict each other, or cannot hold across resizes.
    """
    kept = dict(options)
    first_batch_s = kept.pop("first_batch_s", FIRST_BATCH_S)
    if shuffle is not None and order is not None:
        raise ConfigError("run.loader: shuffle= and order= both say the order; give one of them")
    if shuffle is not None:
        order = Shuffled() if shuffle else Sequential()
    chosen = None if order is None else _as_order(order)
    if isinstance(dataset, DataLoader):
        if kept:
            raise ConfigError(
                f"run.loader(DataLoader(...), {', '.join(kept)}=...): give them to the "
                "DataLoader, or give the data set itself"
            )
        return replace(_read_off(dataset, chosen), first_batch_s=first_batch_s)
    # One pass lasts as long as the generation, so workers are persistent anyway.
    kept.pop("persistent_workers", None)
    if is_iterable(dataset):
        if chosen is not None:
            raise ConfigError(
                f"run.loader: {type(dataset).__name__} is iterable and has an order of its own: "
                "leave shuffle= and order= away, and shuffle in its __iter__"
            )
    elif chosen is None:
        chosen = Shuffled()
    return Loading(
        dataset=dataset,
        order=chosen,
        factory=factory,
        options=kept,
        size=size,
        first_batch_s=first_batch_s,
    )


def is_iterable(dataset: Any) -> bool:
    """Return whether a data set has to be iterated because it cannot be indexed."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _read_off(loader: DataLoader[Any], order: SampleOrder | None) -> Loading:
    if loader.batch_size is None:
        raise ConfigError(
            "run.loader(DataLoader(...)): it needs a batch_size, the samples of a microbatch"
        )
    options = {name: getattr(loader, name) for name in _READ_OFF}
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    if order is None and not is_iterable(loader.dataset):
        order = _order_of(loader)
    return Loading(
        dataset=loader.dataset,
        order=order,
        factory=type(loader),
        options=options,
        size=loader.batch_size,
    )


def _order_of(loader: DataLoader[Any]) -> SampleOrder:
    sampler: Any = loader.sampler
    # torchdata replaces torch's sampler by its own, which has the same fields.
    if isinstance(sampler, SequentialSampler):
        return Sequential()
    if isinstance(sampler, WeightedRandomSampler):
        weights = sampler.weights.tolist()
        return Weighted(weights, count=sampler.num_samples, replacement=sampler.replacement)
    if isinstance(sampler, RandomSampler) or type(sampler).__name__ == "RandomSampler":
        if not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
            return Shuffled()
        ones = [1.0] * len(loader.dataset)  # type: ignore[arg-type]
        return Weighted(ones, count=sampler.num_samples, replacement=sampler.replacement)
    return SamplerOrder(sampler)


def _as_order(order: Any) -> SampleOrder:
    if hasattr(order, "indices"):
        made: SampleOrder = order
        return made
    if not isinstance(order, Iterable):
        raise ConfigError(
            f"run.loader(order={order!r}): give holdfast.Weighted, an order with the methods "
            "length, indices and describe, or a torch Sampler"
        )
    return SamplerOrder(order)
