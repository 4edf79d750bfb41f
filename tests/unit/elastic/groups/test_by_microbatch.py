"""Values of microbatches are put together like torch's own sums, in the order of microbatches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.by_microbatch import ByMicrobatch, How


class Alone:
    """A world of one."""

    def sum_(self, tensor: torch.Tensor) -> None: ...


def reduced(values: list[Any], how: How) -> Any:
    all_ = ByMicrobatch(len(values), gather=lambda value: [value], peers=Alone())
    return all_.reduced(values, range(len(values)), how=how)


def test_truth_values_are_counted() -> None:
    found = reduced([torch.tensor([True, False]), torch.tensor([True, True])], "sum")
    assert found.dtype is torch.int64
    assert found.tolist() == [2, 1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_small_integers_do_not_overflow(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    assert reduced([torch.tensor(most, dtype=dtype)] * 3, "sum").item() == 3 * most


def test_a_mean_of_16_bits_does_not_overflow_and_keeps_its_dtype() -> None:
    found = reduced([torch.tensor(3e4, dtype=torch.float16)] * 5, "mean")
    assert (found.dtype, found.item()) == (torch.float16, 3e4)


@pytest.mark.parametrize("how", ["max", "min"])
def test_the_largest_and_the_smallest_keep_their_dtype(how: How) -> None:
    found = reduced([torch.tensor(x, dtype=torch.int8) for x in (3, -4)], how)
    assert (found.dtype, found.item()) == (torch.int8, 3 if how == "max" else -4)


@pytest.mark.parametrize("kind", [np.int64, np.float32, np.float16])
def test_numbers_of_numpy_are_numbers(kind: Any) -> None:
    assert reduced([kind(1), kind(2), kind(4)], "sum") == 7


def test_large_integers_keep_every_digit() -> None:
    assert reduced([2**70, 1], "sum") == 2**70 + 1


def test_a_mean_of_integers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.int64 has no mean: give floats"):
        reduced([torch.tensor(1), torch.tensor(2)], "mean")


def test_empty_tensors_are_rows_too() -> None:
    all_ = ByMicrobatch(2, gather=lambda value: [value], peers=Alone())
    assert all_.tensors([torch.empty(0, 3)] * 2, [0, 1], fill=None).shape == (2, 0, 3)
