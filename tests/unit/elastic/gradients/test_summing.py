"""Sums over ranks take adjacent tensors as one, and copy the others together."""

from __future__ import annotations

import pytest
import torch

from holdfast.elastic.gradients.summing import sums_of


class Doubled:
    """Two ranks with equal tensors; records the size of each sum."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def sum_(self, tensor: torch.Tensor) -> None:
        self.sizes.append(tensor.numel())
        tensor.mul_(2)


def _cut(whole: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    return list(whole.split(list(sizes)))


ADJACENT = _cut(torch.arange(6), 1, 3, 2)


@pytest.mark.parametrize(
    ("tensors", "are_reused"),
    [
        (ADJACENT, True),
        ([ADJACENT[1].view(3, 1), ADJACENT[2].view(1, 2)], True),
        ([ADJACENT[0], ADJACENT[2]], False),
        (ADJACENT[::-1], False),
        ([torch.arange(2), torch.arange(3)], False),
        ([torch.arange(6).view(2, 3).t()], False),
        ([torch.arange(6).view(2, 3).t(), torch.arange(4)], False),
    ],
    ids=["adjacent", "shaped", "with a gap", "reversed", "apart", "transposed", "mixed"],
)
def test_tensors_become_their_sums(tensors: list[torch.Tensor], are_reused: bool) -> None:
    given = [tensor.clone() for tensor in tensors]
    mine = list(tensors)
    ranks = Doubled()
    found = sums_of(mine, ranks.sum_)
    assert ranks.sizes == [sum(tensor.numel() for tensor in given)], "one sum for all"
    assert all(map(torch.equal, found, (2 * each for each in given)))
    assert all(map(torch.equal, mine, found)) == are_reused
    if are_reused:
        for tensor in mine:
            tensor.floor_divide_(2)
