"""Tensors of which several elements share memory, as after ``expand``, are filled or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast import ckpt
from holdfast.ckpt.errors import MismatchError, StateError
from holdfast.ckpt.state.local_boxes import overlaps_itself


@pytest.mark.parametrize(
    ("shape", "strides", "shared"),
    [
        ((3,), (0,), True),
        ((1, 3), (0, 1), False),
        ((2, 3), (0, 1), True),
        ((3, 2), (1, 2), True),
        ((3, 2), (1, 3), False),
        ((3, 2), (2, 3), False),
        ((4, 3), (2, 3), True),
        ((0, 3), (0, 0), False),
        ((), (), False),
        ((2, 2, 2), (4, 2, 1), False),
        ((1 << 13, 1 << 13), (1, 2), True),
    ],
)
def test_elements_that_share_memory_are_found(
    shape: tuple[int, ...], strides: tuple[int, ...], shared: bool
) -> None:
    room = torch.zeros(1 << 15)
    assert overlaps_itself(room.as_strided(shape, strides)) is shared


def test_an_expanded_tensor_is_filled_with_the_one_value_of_each_place(tmp_path: Path) -> None:
    saved = torch.tensor([[1.0], [2.0]]).expand(2, 3)
    ckpt.save(tmp_path, {"x": saved, "y": torch.ones(2)}, step=1)
    state = {"x": torch.zeros(2, 1).expand(2, 3), "y": torch.zeros(2)}
    report = ckpt.load(tmp_path, state)
    assert torch.equal(state["x"], saved)
    assert state["x"].stride() == (1, 0)
    assert report.tensors == 2


def unfolded() -> torch.Tensor:
    return torch.zeros(4).unfold(0, 3, 1)


@pytest.mark.parametrize(
    ("live", "saved", "error"),
    [
        (lambda: torch.zeros(1).expand(3), [1.0, 2.0, 3.0], MismatchError),
        (lambda: torch.zeros(1).expand(2), [0.0, -0.0], MismatchError),
        (unfolded, [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]], StateError),
    ],
)
def test_a_tensor_that_cannot_hold_the_saved_values_is_refused_before_any_write(
    live: Callable[[], torch.Tensor], saved: list[float], error: type[Exception], tmp_path: Path
) -> None:
    ckpt.save(tmp_path, {"a": torch.ones(2), "x": torch.tensor(saved)}, step=1)
    state = {"a": torch.zeros(2), "x": live()}
    with pytest.raises(error, match=r"\bx\b.*share memory.*clone\(\)"):
        ckpt.load(tmp_path, state)
    assert not any(tensor.any() for tensor in state.values())


def test_an_expanded_state_of_an_optimizer_is_replaced(tmp_path: Path) -> None:
    def build(value: torch.Tensor) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        optimizer.state[weight] = {"momentum_buffer": value}
        return weight, optimizer

    weight, optimizer = build(torch.arange(3.0))
    ckpt.save(tmp_path, {"w": weight, "o": optimizer}, step=1)
    weight, optimizer = build(torch.zeros(1).expand(3))
    ckpt.load(tmp_path, {"w": weight, "o": optimizer})
    assert optimizer.state[weight]["momentum_buffer"].tolist() == [0.0, 1.0, 2.0]
