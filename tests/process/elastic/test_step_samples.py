"""The samples of a step, on all ranks: those that its passes with `backward` really had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lone_run import lone_run
from torch import nn
from torch.utils.data import IterableDataset

from holdfast.elastic.loop.run import Run


class Stream(IterableDataset[torch.Tensor]):
    """Ten samples in each of four shards, one after the other."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(10, 3))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with lone_run(tmp_path) as found:
        yield found


def _trained(run: Run, source: object, *, steps: int = 3, passes: int = 1) -> list[int]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    found = []
    for _ in run.steps(steps):
        for _ in run.microbatches(source):  # type: ignore[arg-type]
            pass  # a pass without `backward` trains nothing
        for _ in range(passes):
            for _ in run.microbatches(source):  # type: ignore[arg-type]
                run.backward(model(torch.ones(2, 3)).mean())
            run.step(optimizer)
        found.append(run._passes.samples)
    return found


@pytest.mark.parametrize("source", [None, torch.ones(7, 3)], ids=["numbers", "dataset"])
def test_without_a_loader_they_are_those_of_the_settings(run: Run, source: object) -> None:
    assert _trained(run, source) == [8, 8, 8]


def test_every_pass_with_backward_counts(run: Run) -> None:
    assert _trained(run, None, passes=2) == [16, 16, 16]


def test_a_loader_has_its_own_and_fewer_at_the_end_of_an_epoch(run: Run) -> None:
    assert _trained(run, run.loader(torch.ones(14, 3), batch=6), steps=4) == [6, 6, 2, 6]


def test_those_of_a_stream_are_counted_as_they_come(run: Run) -> None:
    loader = run.loader(Stream(), batch=16)
    found = _trained(run, loader, steps=3)
    assert found[0] == 16
    assert sum(found[:3]) == 10 * 4
