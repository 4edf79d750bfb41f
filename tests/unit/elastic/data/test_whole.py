"""A data set that is divided by rank is known from one that all ranks have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
)

from holdfast.elastic.data.whole import difference_of, identity_of

DATA = torch.arange(64 * 3).reshape(64, 3).float()


class Samples(Dataset[Any]):
    """Reads nothing here, and has a cache of its own."""

    def __init__(self, count: int = 64) -> None:
        self.count, self.cache, self.scratch = count, [object()], torch.empty(9)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was read")


class Stream(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Any:
        raise AssertionError("a sample was read")


def between(*data: Any, contents: bool = True) -> str:
    return difference_of([identity_of(each, contents=contents) for each in data])


@pytest.mark.parametrize(
    "make",
    [
        lambda part: DATA[part],
        lambda part: DATA.numpy()[part],
        lambda part: DATA.to(torch.bfloat16)[part],
        lambda part: TensorDataset(DATA[part], DATA[part]),
        lambda part: Subset(TensorDataset(DATA), range(64)[part]),
        lambda part: Subset(Samples(), list(range(64))[part]),
        lambda part: ConcatDataset([TensorDataset(DATA), TensorDataset(DATA[part])]),
        lambda part: StackDataset(x=TensorDataset(DATA[part])),
        lambda part: list(DATA)[part],
        lambda part: [(row, str(row)) for row in DATA.tolist()][part],
        lambda part: torch.randn(64, 1 << 19, generator=torch.Generator().manual_seed(0))[part],
    ],
)
def test_a_part_for_each_rank_is_known_though_the_parts_are_of_one_length(make: Any) -> None:
    said = between(make(slice(0, None, 2)), make(slice(1, None, 2)))
    assert said.startswith("rank 0 and rank 1 have a ")
    assert said.endswith("with other contents")
    whole = slice(0, None)
    assert between(make(whole), make(whole), make(whole)) == ""


def test_parts_of_other_lengths_are_known_of_every_class_also_without_contents() -> None:
    assert between(Samples(22), Samples(22), Samples(21), contents=False) == (
        "rank 0 has a Samples of 22 samples, rank 2 a Samples of 21 samples"
    )
    assert between(DATA[::2], DATA[1::2], contents=False) == ""


@pytest.mark.parametrize(
    "make",
    [
        Samples,
        Stream,
        lambda: None,
        lambda: DATA[:0],
        lambda: np.zeros((0, 2)),
        lambda: [Samples()] * 2,
        DATA.to_sparse,
        lambda: np.array([{}, None], dtype=object),
        lambda: {"a": DATA},
        lambda: [],
        lambda: torch.full((5,), float("nan")),
    ],
)
def test_equal_data_sets_of_any_kind_raise_no_alarm(make: Any) -> None:
    assert between(make(), make()) == ""


def test_a_large_view_is_not_copied() -> None:
    large = torch.zeros(1).expand(1 << 40, 4)[::3]
    assert between(large, large) == ""
