"""Uses of what is not the run's are noted with their lines; they do what they did."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from holdfast.elastic.loop.trace import sources

Noted = list[tuple[str, str, str]]


@pytest.fixture
def noted() -> Iterator[Noted]:
    found: Noted = []

    def other(*arguments: Any) -> None:
        found.append(tuple(str(each) if isinstance(each, str) else "" for each in arguments))  # type: ignore[arg-type]

    sources.listen(
        lambda use, line, detail: found.append((use, line.partition(":")[0], detail)),
        stepped=other,
        scheduled=other,
        zeroed=other,
    )
    yield found
    sources.listen(lambda *_: None, stepped=other, scheduled=other, zeroed=other)


HERE = "test_sources.py"


def test_a_loader_is_noted_where_it_is_iterated(noted: Noted) -> None:
    loader = DataLoader([torch.ones(1)] * 4, batch_size=2)
    assert len(list(loader)) == 2
    ((use, file, made),) = noted
    assert (use, file) == ("loader", HERE)
    assert made.startswith(f"{HERE}:")


def test_a_generator_of_ones_own_is_noted_and_the_default_one_is_not(noted: Noted) -> None:
    own = torch.Generator().manual_seed(1)
    expected = torch.randn(3, generator=torch.Generator().manual_seed(1))
    with sources.ForeignGenerators(set()):
        drawn = torch.randn(3, generator=own)
        torch.randn(3)
        torch.empty(3).normal_(generator=torch.default_generator)
    assert torch.equal(drawn, expected)
    assert noted == [("generator", HERE, "randn")]


def test_the_runs_own_generators_are_not_noted(noted: Noted) -> None:
    own = torch.Generator()
    with sources.ForeignGenerators({id(own)}):
        torch.randn(3, generator=own)
    assert noted == []


def test_random_of_ones_own_is_noted_and_the_module_is_not(noted: Noted) -> None:
    assert random.Random(3).random() == random.Random(3).random()
    random.random()
    random.shuffle([1, 2])
    numbers = [1, 2, 3]
    random.Random(3).shuffle(numbers)
    assert {(use, file) for use, file, _ in noted} == {("python generator", HERE)}


def test_clocks_and_numpys_generators_are_noted(noted: Noted) -> None:
    time.perf_counter()
    np.random.default_rng()
    np.random.default_rng(0)
    assert noted == [
        ("clock", HERE, "perf_counter"),
        ("numpy generator", HERE, "unseeded"),
        ("numpy generator", HERE, ""),
    ]


def test_what_torch_itself_does_is_not_noted(noted: Noted) -> None:
    nn.Linear(2, 2)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert noted == []


def test_steps_and_dropped_gradients_are_told_with_their_line(noted: Noted) -> None:
    parameter = nn.Parameter(torch.ones(1))
    opt = torch.optim.SGD([parameter], lr=0.1)
    opt.step()
    opt.zero_grad()
    (_, by_hand), (_, zeroed) = noted  # type: ignore[misc]
    assert by_hand.startswith(f"{HERE}:")
    assert zeroed.startswith(f"{HERE}:")
