"""Rounds as numbers: slices, chunks, and the rounds of a step."""

from __future__ import annotations

from typing import Any

import pytest
from adapter_packages import needs

pytestmark = needs("transformers", "accelerate", "safetensors")


def shape_of(**given: int) -> Any:
    from holdfast.adapters.hf.grpo.shape import RoundShape

    plain = {"rows": 4, "group": 2, "slices": 2, "iterations": 1, "microbatches": 2}
    return RoundShape(**{**plain, **given})


@pytest.mark.parametrize(
    ("given", "chunk", "chunks"),
    [
        ({}, 4, 2),
        ({"rows": 2, "group": 4, "slices": 4}, 4, 2),
        ({"group": 6, "slices": 6}, 12, 2),
        ({"rows": 1, "group": 8, "slices": 8}, 8, 1),
    ],
)
def test_a_chunk_has_whole_groups_and_whole_slices(
    given: dict[str, int], chunk: int, chunks: int
) -> None:
    shape = shape_of(**given)
    assert (shape.chunk, shape.chunks) == (chunk, chunks)
    assert shape.chunk * shape.chunks == shape.completions
    assert shape.chunk % shape.group == shape.chunk % shape.rows == 0


def test_a_round_is_gone_through_once_in_each_iteration() -> None:
    shape = shape_of(slices=3, iterations=2)
    assert [shape.slice_at(m) for m in range(8)] == [
        *((0, 0), (0, 1), (0, 2), (0, 0), (0, 1), (0, 2)),
        *((1, 0), (1, 1)),
    ]
    assert [m for m in range(8) if not shape.is_within(m)] == [0, 6]


@pytest.mark.parametrize(
    ("microbatches", "rounds"), [(range(2), [0]), (range(4, 8), [1, 2]), (range(0), [])]
)
def test_a_step_needs_the_rounds_of_its_microbatches(
    microbatches: range, rounds: list[int]
) -> None:
    assert list(shape_of(slices=3).rounds_of(microbatches)) == rounds


def test_the_last_step_of_an_epoch_may_be_smaller() -> None:
    from holdfast.adapters.hf.grpo.shape import Epochs

    epochs = Epochs(microbatches=5, most=2)
    assert epochs.steps == 3
    assert [epochs.of_step(step) for step in range(4)] == [
        *((0, range(0, 2)), (0, range(2, 4)), (0, range(4, 5))),
        (1, range(0, 2)),
    ]
