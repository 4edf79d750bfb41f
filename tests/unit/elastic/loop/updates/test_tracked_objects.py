"""Tracked objects are found by themselves, in containers, and in objects that hold them."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.updates.tracked_objects import TrackedObjects


def tracked(model: nn.Module, **state: Any) -> TrackedObjects:
    return TrackedObjects(
        {"model": model, **state}, lambda: [(f"model.{n}", p) for n, p in model.named_parameters()]
    )


def test_optimizers_have_the_names_of_their_places() -> None:
    model = nn.Linear(2, 2)
    a, b = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    found = tracked(model, opts={"a": a, "more": [b]})
    assert [name for name, _ in found.optimizers] == ["opts.a", "opts.more.0"]
    assert found.name(b) == "opts.more.0"
    assert found.name(torch.optim.SGD(model.parameters(), 0.1)) == ""
    assert found.parameter(a) == "model.weight"


def test_scalers_that_are_enabled_are_found() -> None:
    on, off = GradScaler("cpu"), GradScaler("cpu", enabled=False)
    assert list(tracked(nn.Linear(1, 1), both=[on, off]).scalers()) == [on]


def test_what_tracked_objects_hold_is_tracked_too() -> None:
    inner, bound, closed, other = (SimpleNamespace(x=i) for i in range(4))

    def reads() -> object:
        return closed

    holder = SimpleNamespace(inner=[{"deep": inner}], call=functools.partial(print, bound), f=reads)
    found = tracked(nn.Linear(1, 1), holder=holder)
    assert all(map(found.has, (holder, inner, bound, closed)))
    assert not found.has(other)


def test_an_optimizer_of_foreign_parameters_is_refused_by_the_parameter() -> None:
    stray = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([("stray", stray)], 0.1)
    with pytest.raises(ConfigError, match=r"optimizer opt steps .*\(parameter stray, shape \(3,\)"):
        tracked(nn.Linear(1, 1), opt=optimizer).refuse_foreign()
    stray.requires_grad_(False)
    tracked(nn.Linear(1, 1), opt=optimizer).refuse_foreign()
