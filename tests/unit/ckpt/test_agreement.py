"""A plain value that every rank has must be equal on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.ckpt.agreement import check_values
from holdfast.ckpt.errors import StateError
from holdfast.ckpt.state.capture import PerRank, flatten


def at_all_ranks(states: list[dict[str, Any]]) -> list[str]:
    """Run the check as ranks do, in threads; return the error of each."""
    barrier = threading.Barrier(len(states), timeout=20)
    board: list[Any] = [None] * len(states)
    errors = [""] * len(states)

    def gather_at(rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            board[rank] = value
            barrier.wait()
            found = list(board)
            barrier.wait()
            return found

        return gather

    def run(rank: int) -> None:
        try:
            check_values(flatten(states[rank]), gather=gather_at(rank))
        except StateError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_equal_values_and_values_of_some_ranks_only_are_fine() -> None:
    states = [{"n": 1, "deep": {"k": [1, 2.5]}, "own": PerRank(r)} for r in range(3)]
    assert at_all_ranks(states) == ["", "", ""]
    assert at_all_ranks([{"n": 1, "first": 2}, {"n": 1}, {"n": 1, "last": 3}]) == ["", "", ""]


@pytest.mark.parametrize("other", [2, 1.0, True, "1", None, [1]])
def test_a_value_that_differs_is_named_at_every_rank(other: Any) -> None:
    errors = at_all_ranks([{"a": 0, "n": 1}, {"a": 0, "n": 1}, {"a": 0, "n": other}])
    assert len(set(errors)) == 1
    assert errors[0].startswith("n: the ranks have different values: rank 0: 1; rank 2: ")
    assert "PerRank" in errors[0]


def test_long_values_are_cut_and_told_apart() -> None:
    (error, _) = at_all_ranks([{"t": ["x" * 500, 1], "z": 1}, {"t": ["x" * 500, 2], "z": 2}])
    assert len(error) < 600
    assert "(and 1 more values)" in error
    texts = error.split("rank 0: ")[1].split(". One")[0].split("; rank 1: ")
    assert texts[0] != texts[1]


def stage(first: int, *, lr: float = 0.1, foreach: bool = False) -> dict[str, Any]:
    model = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(first, first + 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, foreach=foreach)
    return {"model": model, "optimizer": optimizer}


def test_stages_may_have_other_parameters_and_kernels_but_not_other_settings() -> None:
    assert at_all_ranks([stage(0), stage(2, foreach=True)]) == ["", ""]
    errors = at_all_ranks([stage(0), stage(2, lr=0.2)])
    assert errors[0].startswith("optimizer.groups.0.lr: the ranks have different values")


def test_the_order_of_a_dict_may_differ_between_ranks() -> None:
    one, other = {"d": {"z": 1, "a": {2: 0, 1: 0}}}, {"d": {"a": {1: 0, 2: 0}, "z": 1}}
    assert at_all_ranks([one, other]) == ["", ""]
    assert all(
        "d: the ranks have different" in text for text in at_all_ranks([one, {"d": {"z": 1}}])
    )
