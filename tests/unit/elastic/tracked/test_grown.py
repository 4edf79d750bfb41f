"""Tensors that come, go or change shape in a loop are refused before a restore would miss them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from holdfast.ckpt.state.capture import CapturePlan
from holdfast.ckpt.state.flatten import flatten
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.tracked.grown import BuiltTensors


class Best:
    """Keeps the best weights, once there are any."""

    def __init__(self) -> None:
        self.weights: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def built() -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return {
        "net": net,
        "optimizer": torch.optim.AdamW(net.parameters()),
        "frozen": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)),
        "best": Best(),
        "tree": {"mean": torch.zeros(2), "seen": []},
        "loose": torch.zeros(1),
    }


def look(built: BuiltTensors, state: dict[str, Any], *, step: int) -> None:
    built.look(flatten(state), cast("CapturePlan", object()), step=step)


def grow_optimizer(state: dict[str, Any]) -> None:
    state["net"](torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["net"].append(nn.Linear(1, 1)), r"net\.2\.bias was added by step 3,"),
        (lambda s: s["net"].register_buffer("mask", torch.ones(2)), r"net\.mask was added"),
        (lambda s: s["frozen"].pop(1), r"frozen\.1\.bias was removed by step 3,"),
        (
            lambda s: s["frozen"][0].register_parameter("weight", nn.Parameter(torch.ones(3, 2))),
            r"frozen\.0\.weight had shape \(2, 2\) and has \(3, 2\) by step 3",
        ),
        (lambda s: s["tree"].update(best=torch.ones(2)), r"tree\.best was added"),
        (lambda s: s["tree"]["seen"].append(torch.ones(2)), r"tree\.seen\.0 was added"),
        (lambda s: s["tree"].update(mean=None), r"tree\.mean was removed"),
        (lambda s: s.update(loose=torch.ones(2)), r"loose had shape \(1,\) and has \(2,\)"),
    ],
)
def test_a_change_is_named(change: Callable[[dict[str, Any]], object], words: str) -> None:
    state, tensors = built(), BuiltTensors()
    look(tensors, state, step=0)
    change(state)
    with pytest.raises(ConfigError, match=words):
        look(tensors, state, step=4)


@pytest.mark.parametrize(
    "change",
    [
        grow_optimizer,
        lambda s: setattr(s["best"], "weights", torch.ones(2)),
        lambda s: s["net"].register_buffer("mask", torch.ones(2), persistent=False),
        lambda s: s["net"].append(nn.Dropout()),
        lambda s: s["tree"].update(mean=torch.ones(2), count=3),
        lambda s: s["tree"]["seen"].append(3),
    ],
)
def test_what_a_restore_brings_back_may_change(change: Callable[[dict[str, Any]], object]) -> None:
    state, tensors = built(), BuiltTensors()
    look(tensors, state, step=0)
    change(state)
    look(tensors, state, step=1)


def test_only_a_new_plan_is_compared() -> None:
    state, tensors, plan = built(), BuiltTensors(), cast("CapturePlan", object())
    tensors.look(flatten(state), plan, step=0)
    state["frozen"].pop(1)
    tensors.look(flatten(state), plan, step=1)
    with pytest.raises(ConfigError, match="was removed"):
        look(tensors, state, step=1)
