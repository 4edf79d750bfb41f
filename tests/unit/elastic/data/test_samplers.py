"""Samplers of torch as orders of loaders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

from holdfast.elastic.data.options import Loading, loading_of
from holdfast.elastic.data.samplers import SamplerOrder
from holdfast.elastic.errors import ConfigError

DATA = TensorDataset(torch.arange(6))


class Pairs(Sampler[int]):
    """Every sample twice in a row, in random order; from its own generator if it has one."""

    def __init__(self, samples: int, *, generator: torch.Generator | None = None) -> None:
        self.samples, self.generator, self.epochs = samples, generator, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 2 * self.samples

    def __iter__(self) -> Iterator[int]:
        for index in torch.randperm(self.samples, generator=self.generator).tolist():
            yield from (index, index)


class Selfish(Pairs):
    """One that draws from a generator that nobody else knows."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self._hidden = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        found = [*range(self.samples), *range(self.samples)]
        self._hidden.shuffle(found)
        yield from found


class Short(Pairs):
    def __iter__(self) -> Iterator[int]:
        yield 0


def at(order: Any, positions: range, *, seed: int = 1, epoch: int = 0) -> list[int]:
    found: list[int] = order.indices(positions, samples=6, seed=seed, epoch=epoch)
    return found


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_an_epoch_depends_on_seed_and_number_alone(generator: torch.Generator | None) -> None:
    first, second = (SamplerOrder(Pairs(6, generator=generator)) for _ in range(2))
    whole = at(first, range(12), epoch=3)
    torch.randperm(5, generator=generator)
    assert [at(second, range(i, i + 1), epoch=3)[0] for i in range(12)] == whole
    assert at(second, range(12), epoch=2) != whole != at(second, range(12), seed=2, epoch=3)
    assert at(first, range(12), epoch=3) == whole
    assert sorted(whole) == sorted([*range(6), *range(6)])
    assert (first.length(6), first.describe()) == (12, second.describe())


def test_generators_are_afterwards_as_before() -> None:
    own = torch.Generator().manual_seed(5)
    before = torch.get_rng_state(), random.getstate(), own.get_state()
    sampler = Pairs(6, generator=own)
    at(SamplerOrder(sampler), range(3), epoch=4)
    after = torch.get_rng_state(), random.getstate(), own.get_state()
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])
    assert sampler.epochs[-1] == 4


@pytest.mark.parametrize(
    ("sampler", "named"),
    [
        (DistributedSampler(DATA, num_replicas=2, rank=0), "divides the data set by rank"),
        (BatchSampler(Pairs(6), 2, drop_last=False), r"BatchSampler yields \[.*no batch sampler"),
        (iter([1, 2]), "has no length"),
        (Selfish(6), "Selfish draws another order each time.*`generator`"),
        (Short(6), "length 12 and yields 1 samples in epoch 0"),
    ],
)
def test_a_sampler_that_is_no_order_is_refused_by_name(sampler: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SamplerOrder(sampler)


def test_a_sampler_of_another_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="yields samples 6 to 8 of a data set of 6"):
        at(SamplerOrder([6, 8]), range(2))


def read_off(dataset: Any, order: Any = None) -> Loading:
    return loading_of(dataset, size=1, shuffle=None, order=order, factory=DataLoader, options={})


def test_a_loader_takes_a_sampler_and_a_dataloader_with_one() -> None:
    given = read_off(DATA, Pairs(6)).order
    taken = read_off(DataLoader(DATA, batch_size=2, sampler=Pairs(6))).order
    assert isinstance(given, SamplerOrder)
    assert isinstance(taken, SamplerOrder)
    assert at(given, range(12)) == at(taken, range(12))


def test_an_order_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"order=7\): give holdfast.Weighted"):
        read_off(DATA, 7)
