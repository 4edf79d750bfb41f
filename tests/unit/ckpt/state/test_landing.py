"""Live tensors that share memory get all their saved contents, or are refused unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import ckpt
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.geometry.layout import TensorSpec
from holdfast.ckpt.state.landing import overlapping


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight.data = self.embed.weight.data


def test_weights_tied_by_data_are_no_damage(tmp_path: Path) -> None:
    for step in (1, 2):
        ckpt.save(tmp_path, {"m": Model(tied=False)}, step=step)
    live = Model(tied=True)
    before = live.embed.weight.detach().clone()
    with pytest.raises(MismatchError, match=r"m\.embed\.weight, m\.head\.weight are one tensor"):
        ckpt.load(tmp_path, {"m": live})
    assert torch.equal(live.embed.weight, before)


def test_weights_tied_by_data_load_what_was_saved_of_them(tmp_path: Path) -> None:
    saved, live = Model(tied=True), Model(tied=True)
    ckpt.save(tmp_path, {"m": saved}, step=1)
    ckpt.load(tmp_path, {"m": live})
    assert torch.equal(live.embed.weight, saved.embed.weight)
    assert live.head.weight.data_ptr() == live.embed.weight.data_ptr()


def views(base: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return tensors that overlap in part, lie between each other, and have other types."""
    return {
        "low": base[:40],
        "high": base[30:],
        "even": base[::2],
        "odd": base[1::2],
        "columns": base[:60].view(10, 6)[:, 1:3],
        "bits": base[4:20].view(torch.int32),
        "wide": base[8:24].view(torch.float64),
    }


def test_views_of_one_memory_load(tmp_path: Path) -> None:
    base, live = torch.randn(80), torch.zeros(80)
    base[[0, 11, 33]] = float("nan")
    ckpt.save(tmp_path, views(base), step=1)
    ckpt.load(tmp_path, views(live))
    assert torch.equal(live.view(torch.int32), base.view(torch.int32))


@pytest.mark.parametrize("name", list(views(torch.zeros(80))))
def test_views_that_were_saved_as_others_are_refused_unchanged(tmp_path: Path, name: str) -> None:
    saved = {each: tensor.clone() for each, tensor in views(torch.randn(80)).items()}
    saved[name] = saved[name] + 1
    ckpt.save(tmp_path, saved, step=1)
    live = torch.zeros(80)
    with pytest.raises(MismatchError, match="are one tensor here, and were saved with other"):
        ckpt.load(tmp_path, views(live))
    assert not live.any()


def test_what_shares_nothing_is_not_looked_at() -> None:
    base = torch.zeros(12)
    parts = {"a": base[:4], "b": base[4:8], "c": base[8:], "none": base[3:3], "alone": base.clone()}
    assert overlapping({name: target(name, part) for name, part in parts.items()}) == []
    parts |= {"d": base[7:9]}
    found = overlapping({name: target(name, part) for name, part in parts.items()})
    assert found == [["b", "d", "c"]]


def target(name: str, tensor: torch.Tensor) -> Any:
    shape = tuple(tensor.shape)
    return TensorSpec(fqn=name, dtype="float32", shape=shape), [(whole(shape), tensor)]
