"""Parts of one model have the names of the whole model, on every rank and at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import ckpt
from holdfast.ckpt.snapshot.change_watch import ChangeWatch
from holdfast.ckpt.state.flatten import flatten


class Layers(nn.Module):
    """Some layers of a stack of four, under the names they have in all of it."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 3) for number in numbers})
        self.register_buffer(f"calls_{numbers[0]}", torch.zeros(()))


def state_of(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_they_are_named_as_in_the_whole_model() -> None:
    parts = ckpt.ModelParts([Layers(0), Layers(2)])
    flat = flatten(state_of(parts))
    names = [f"layers.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
    assert [name for name, _ in parts.named_parameters()] == names
    assert {f"model.{name}" for name in names} <= flat.tensors.keys()
    assert {"model.calls_0", "model.calls_2"} <= flat.tensors.keys()
    assert "optimizer.state.model.layers.2.weight.exp_avg" in flat.tensors
    assert flat.values["optimizer.groups.0.params"] == [f"model.{name}" for name in names]


def test_a_rank_may_have_other_parts_when_it_comes_back(tmp_path: Path) -> None:
    saved = state_of(ckpt.ModelParts([Layers(0, 1), Layers(2, 3)]))
    ckpt.save(tmp_path, saved, step=1)
    wanted = dict(saved["model"].named_parameters())
    parts = ckpt.ModelParts([Layers(2), Layers(0)])
    optimizer = torch.optim.AdamW(parts.parameters())
    state: dict[str, Any] = {"model": parts, "optimizer": optimizer}
    ckpt.load(tmp_path, state, strict="ignore-extra")
    for name, parameter in parts.named_parameters():
        assert torch.equal(parameter, wanted[name])
        before = saved["optimizer"].state[wanted[name]]
        assert torch.equal(optimizer.state[parameter]["exp_avg"], before["exp_avg"])


def test_a_second_look_knows_them_again_and_sees_what_changed_in_them() -> None:
    watch, parts = ChangeWatch(), ckpt.ModelParts([Layers(0), Layers(1)])
    state = state_of(parts)
    assert not watch.flatten(state)[1]
    assert watch.flatten(state)[1]
    flat, same = watch.flatten({**state, "model": ckpt.ModelParts(parts)})
    assert not same, "another object"
    parts[1].register_buffer("late", torch.zeros(2))
    flat, same = watch.flatten({**state, "model": parts})
    assert not same and "model.late" in flat.tensors


def test_what_they_share_counts_once() -> None:
    first, second = Layers(0), Layers(1)
    second.layers["1"].weight = first.layers["0"].weight
    parts = ckpt.ModelParts([first, second])
    assert len(list(parts.parameters())) == 3
    assert flatten({"model": parts}).aliases == {"model.layers.1.weight": "model.layers.0.weight"}


def test_what_cannot_be_parts_of_one_model_is_refused() -> None:
    with pytest.raises(ckpt.StateError, match=r"model\.calls_0: two entries"):
        flatten({"model": ckpt.ModelParts([Layers(0), Layers(0)])})
    with pytest.raises(ckpt.ArgumentError, match="part 1 is Tensor, not a module"):
        ckpt.ModelParts([nn.Linear(1, 1), torch.zeros(1)])  # type: ignore[list-item]
    module = nn.Linear(1, 1)
    with pytest.raises(ckpt.ArgumentError, match="ModelParts of a int: give a list"):
        ckpt.ModelParts(3)  # type: ignore[arg-type]
    with pytest.raises(ckpt.ArgumentError, match="part 1 was there before"):
        ckpt.ModelParts([module, module])


def test_they_are_a_sequence_of_modules() -> None:
    modules = [nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)]
    parts = ckpt.ModelParts(iter(modules))
    assert list(parts) == modules and len(parts) == 3
    assert parts[-1] is modules[-1] and parts[1:] == tuple(modules[1:])
