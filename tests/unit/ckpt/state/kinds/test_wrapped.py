"""Tensors that wrap others are captured part by part; the parts of another kind are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doubles.quantised import Quantised
from torch import nn

from holdfast import ckpt
from holdfast.ckpt.errors import CkptError, StateError
from holdfast.ckpt.snapshot.change_watch import ChangeWatch
from holdfast.ckpt.state.flatten import flatten


class Base(nn.Module):
    def __init__(self, seed: int = 0, *, block: int = 32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        integers = torch.randint(-128, 127, (6, 4), generator=draw, dtype=torch.int8)
        whole = Quantised(integers, torch.rand(6, generator=draw), block)
        self.weight = nn.Parameter(whole, requires_grad=False)

    def parts(self) -> list[torch.Tensor]:
        return [self.weight.integers, self.weight.scale]


def test_the_parts_are_saved_and_filled_in_place(tmp_path: Path) -> None:
    saved, loaded = Base(1), Base(2)
    ckpt.save(str(tmp_path), {"model": saved}, step=1)
    before = loaded.parts()
    ckpt.load(str(tmp_path), {"model": loaded})
    assert all(map(torch.equal, loaded.parts(), saved.parts()))
    assert all(here is there for here, there in zip(loaded.parts(), before, strict=True))


def test_parts_of_another_kind_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    ckpt.save(str(tmp_path), {"model": Base(1)}, step=1)
    other = Base(2, block=64)
    before = [part.clone() for part in other.parts()]
    with pytest.raises(CkptError, match="build the model with the same quantisation"):
        ckpt.load(str(tmp_path), {"model": other})
    assert all(map(torch.equal, other.parts(), before))


def test_weights_that_are_used_twice_are_saved_once() -> None:
    base = Base()
    flat = flatten({"one": base, "two": base.weight})
    assert sorted(flat.tensors) == ["one.weight.integers", "one.weight.scale"]
    assert flat.aliases["two.integers"] == "one.weight.integers"


def test_a_part_that_is_replaced_is_seen() -> None:
    base, watch = Base(), ChangeWatch()
    state = {"model": base}
    watch.flatten(state)
    assert watch.flatten(state)[1]
    base.weight.scale = base.weight.scale + 1
    flat, same = watch.flatten(state)
    assert not same
    assert flat.tensors["model.weight.scale"] is base.weight.scale


def test_one_that_is_trained_is_refused() -> None:
    base = Base()
    base.weight.requires_grad_(True)
    with pytest.raises(StateError, match=r"Quantised cannot be captured while it is trained"):
        flatten({"model": base})
