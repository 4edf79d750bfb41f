"""Attributes that hooks change are kept as differences, and put back into new objects."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.adapters.lightning.fitting.attributes import (
    KeptAttributes,
    Owner,
    detached,
    first_difference,
    modules_of,
    same,
)
from holdfast.elastic import ConfigError


class Reason(Enum):
    NONE = 0
    DONE = 1


class Count:
    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total = state["total"]


class Hooks:
    """An object with attributes of all kinds."""

    def __init__(self) -> None:
        self.number, self.text, self.nothing = 1, "a", None
        self.tensor, self.array = torch.zeros(2), np.zeros(2)
        self.rows: list[Any] = [1, {"a": deque([2])}]
        self.reason = Reason.NONE
        self.count, self.call, self.other = Count(), print, object()
        self.spare = 1


def kept(value: Any, **more: Any) -> KeptAttributes:
    return KeptAttributes([Owner("hooks", value)], **more)


def test_unchanged_attributes_are_no_difference() -> None:
    hooks = Hooks()
    attributes = kept(hooks)
    assert attributes.collect() == {}
    hooks.tensor = torch.zeros(2)
    assert attributes.collect() == {}


def test_changed_attributes_come_back_in_a_new_object() -> None:
    hooks, again = Hooks(), Hooks()
    first, second = kept(hooks), kept(again)
    hooks.number, hooks.nothing = 2, 3
    hooks.tensor += 1
    hooks.array[0] = 5
    hooks.rows[1]["a"].append(torch.ones(1))
    hooks.reason, hooks.count.total = Reason.DONE, 7
    hooks.added = {"b": (1, 2)}  # type: ignore[attr-defined]
    del hooks.spare
    saved = first.collect()
    hooks.tensor += 1
    second.restore(saved)
    assert (again.number, again.text, again.nothing) == (2, "a", 3)
    assert again.tensor.tolist() == [1, 1]
    assert again.array.tolist() == [5, 0]
    assert again.rows == [1, {"a": deque([2, torch.ones(1)])}]
    assert (again.reason, again.count.total) == (Reason.DONE, 7)
    assert again.added == {"b": (1, 2)}  # type: ignore[attr-defined]
    assert not hasattr(again, "spare")
    assert first_difference(second.collect(), saved) == ""


@pytest.mark.parametrize(("name", "value"), [("number", object()), ("text", Count())])
def test_an_object_that_a_restore_cannot_make_is_refused(name: str, value: object) -> None:
    hooks = Hooks()
    attributes = kept(hooks)
    setattr(hooks, name, value)
    with pytest.raises(ConfigError, match=rf"set hooks\.{name} to a \w+, which a restore cannot"):
        attributes.collect()


def test_what_is_ignored_or_tracked_elsewhere_is_left_alone() -> None:
    hooks = Hooks()
    layer = torch.nn.Linear(2, 2)
    hooks.other = layer
    owner = Owner("hooks", hooks, frozenset({"number"}))
    attributes = KeptAttributes([owner], tracked=modules_of(layer))
    hooks.number = 9
    with torch.no_grad():
        layer.weight += 1
    assert attributes.collect() == {}


def test_a_layer_of_a_callback_is_kept_by_its_state() -> None:
    hooks, again = Hooks(), Hooks()
    hooks.other, again.other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    first, second = kept(hooks), kept(again)
    with torch.no_grad():
        hooks.other.weight += 1
    second.restore(first.collect())
    assert torch.equal(hooks.other.weight, again.other.weight)


def test_values_are_compared_by_their_bits_and_nan_equals_itself() -> None:
    nan = float("nan")
    assert same([nan, torch.tensor([nan])], [nan, torch.tensor([nan])])
    assert not same(1, 1.0)
    assert not same(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert first_difference({"a": {"x": 1}}, {}) == "a.x"
    assert first_difference({"a": {"x": 1}}, {"a": {"x": 2}}) == "a.x"


def test_a_copy_shares_nothing() -> None:
    value = {"a": {"b": torch.zeros(1)}, "c": [1]}
    copied = detached(value)
    copied["a"]["b"] += 1
    copied["c"].append(2)
    assert value == {"a": {"b": torch.zeros(1)}, "c": [1]}
