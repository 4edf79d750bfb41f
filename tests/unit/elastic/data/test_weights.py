"""Weights that the caller finds in the contents of microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.elastic.data.loaders import LoadedMicrobatch
from holdfast.elastic.data.weights import weighed
from holdfast.elastic.errors import ConfigError


def piece(number: int, batch: Any, *, samples: int = 2) -> LoadedMicrobatch:
    weight = 1.0 if samples else 0.0
    return LoadedMicrobatch(microbatch=number, weight=weight, samples=samples, fetch=lambda: batch)


def alone(tensor: torch.Tensor) -> None:
    """Add nothing: there is one rank."""


def test_the_weights_are_shares_of_the_whole_step() -> None:
    found = weighed([piece(0, 3), piece(1, 1)], float, microbatches=2, add=alone)
    assert [each.weight for each in found] == [1.5, 0.5]
    assert [each.counted for each in found] == [3.0, 1.0]
    assert [each.fetch() for each in found] == [3, 1]


def test_the_microbatches_of_other_ranks_count() -> None:
    def others(tensor: torch.Tensor) -> None:
        tensor[1] += 6.0

    (found,) = weighed([piece(0, torch.tensor(2))], lambda x: x, microbatches=2, add=others)
    assert (found.weight, found.counted) == (0.5, 2.0)


def test_a_stand_in_adds_nothing_and_is_not_weighed() -> None:
    def weigh(batch: str) -> float:
        assert batch == "mine"
        return 5.0

    found = weighed(
        [piece(0, "mine"), piece(0, "stand-in", samples=0)], weigh, microbatches=2, add=alone
    )
    assert [(each.weight, each.counted) for each in found] == [(2.0, 5.0), (0.0, 0.0)]


def test_a_microbatch_without_labels_has_no_weight() -> None:
    found = weighed([piece(0, 0), piece(1, 4)], float, microbatches=2, add=alone)
    assert [each.weight for each in found] == [0.0, 2.0]


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), None, torch.ones(2), "x"])
def test_a_weight_that_is_none_is_refused_with_the_microbatch(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"weigh=\.\.\.\) returned .* for microbatch 3: give a"):
        weighed([piece(3, 1)], lambda _: wrong, microbatches=4, add=alone)  # type: ignore[arg-type, return-value]


def test_a_step_without_any_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match="returned 0 for every microbatch"):
        weighed([piece(0, 0), piece(1, 0)], float, microbatches=2, add=alone)
