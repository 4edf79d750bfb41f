"""Digests tell values apart by their bits, and see the same in equal ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from holdfast.ckpt.state.trees.per_rank import PerRank
from holdfast.elastic.loop.trace.digests import digest_of, draws, has_own, state_digests
from holdfast.elastic.loop.trace.records import StateSeen


@dataclass
class Pair:
    left: Any
    right: Any


EQUAL = [
    (torch.arange(6.0), torch.arange(6.0)),
    (torch.arange(6.0).view(2, 3).T, torch.arange(6.0).view(2, 3).T.contiguous()),
    ({"x": [torch.ones(2), 3]}, {"x": (torch.ones(2), 3)}),
    ({"a", "b", "c"}, {"c", "a", "b"}),
    ({"a": 1, "b": [{"c": 2, "d": 3}]}, {"b": [{"d": 3, "c": 2}], "a": 1}),
    (Pair(left=1, right=torch.ones(1)), Pair(left=1, right=torch.ones(1))),
    (np.float32(1), np.float32(1)),
    (torch.ones(2, 2).to_sparse(), torch.ones(2, 2).to_sparse()),
    (torch.zeros(0), torch.zeros(0)),
]
DIFFERENT = [
    (torch.zeros(1), -torch.zeros(1)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (1, 1.0),
    ([1, [2]], [1, 2]),
    ({"a": 1}, {"b": 1}),
    (Pair(left=1, right=2), Pair(left=2, right=1)),
    (np.array(["a"], dtype=object), np.array(["b"], dtype=object)),
    (torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.float16)),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_values_have_equal_digests(one: Any, other: Any) -> None:
    assert digest_of(one) == digest_of(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_values_have_different_digests(one: Any, other: Any) -> None:
    assert digest_of(one) != digest_of(other)


def test_a_value_that_holds_itself_has_a_digest() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert digest_of(loop)


def test_a_draw_shows_in_the_generator_it_came_from() -> None:
    before = draws()
    torch.rand(1)
    after = draws()
    assert {name for name in before if before[name] != after[name]} == {"torch"}


def test_the_leaves_of_a_state_have_names_kinds_and_values() -> None:
    net = nn.BatchNorm1d(2)
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    found = state_digests({"net": net, "opt": opt, "progress": {"best": 0.8, "name": "x"}})
    assert found["net.weight"].kind == "parameter"
    assert found["net.weight"].norm == pytest.approx(2**0.5)
    assert found["net.running_mean"].kind == "buffer"
    assert found["opt.groups.0.lr"].shown == "0.5"
    assert found["progress.best"].shown == "0.8"
    assert "progress" not in found


def test_tensors_of_equal_norm_have_different_marks() -> None:
    one, other = (state_digests({"t": t})["t"] for t in (torch.eye(2)[0], torch.eye(2)[1]))
    assert one.norm == other.norm
    assert one.mark != other.mark


class OfARank:
    """State that each rank has for itself; ``clock`` is another number each time."""

    def __init__(self) -> None:
        self.board, self.calls = torch.ones(2), 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        return {"board": self.board, "turns": 3, "clock": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_what_a_rank_has_for_itself_is_marked_and_clocks_are_left_out() -> None:
    state = {"game": PerRank(OfARank()), "net": nn.Linear(1, 1)}
    kinds = {name: leaf.kind for name, leaf in state_digests(state, rank=2).items()}
    assert kinds == {
        "game@2.board": "own",
        "game@2.turns": "own",
        "net.weight": "parameter",
        "net.bias": "parameter",
    }
    assert has_own(state)
    assert not has_own({"net": nn.Linear(1, 1)})


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_tensor_that_is_not_finite_has_a_digest_that_can_be_written(number: float) -> None:
    leaves = state_digests({"best": torch.full((2,), number)})
    seen = StateSeen(step=0, after=True, leaves=leaves)
    assert msgspec.json.decode(msgspec.json.encode(seen), type=StateSeen) == seen
    assert leaves["best"].norm == -1.0
