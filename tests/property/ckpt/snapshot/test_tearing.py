"""The windows of device tensors that are looked at: they lie where they say, all in turn."""

from __future__ import annotations

from math import prod

import torch
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.snapshot.tearing import window_of

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def tensor_of(shape: tuple[int, ...], *, turned: bool) -> torch.Tensor:
    """Return a tensor of different elements, in C order or with its dims in reverse in memory."""
    plain = torch.arange(prod(shape), dtype=torch.int32)
    return (
        plain.view(shape[::-1]).permute(list(range(len(shape)))[::-1])
        if turned
        else (plain.view(shape))
    )


@settings(max_examples=examples(200))
@given(shape=SHAPES, turned=st.booleans(), turn=st.integers(0, 1000), nbytes=st.integers(1, 600))
def test_a_window_has_the_stored_bytes_at_its_place(
    shape: tuple[int, ...], turned: bool, turn: int, nbytes: int
) -> None:
    tensor = tensor_of(shape, turned=turned)
    view, at = window_of(tensor, turn=turn, nbytes=nbytes)
    assert view.numel() * 4 <= max(nbytes, 4)
    stored = tensor.contiguous().reshape(-1)[at // 4 : at // 4 + view.numel()]
    assert torch.equal(view.reshape(-1), stored)


@settings(max_examples=examples(50))
@given(shape=SHAPES, nbytes=st.integers(1, 600))
def test_every_element_has_its_turn(shape: tuple[int, ...], nbytes: int) -> None:
    tensor = tensor_of(shape, turned=False)
    seen: set[int] = set()
    for turn in range(tensor.numel()):
        seen |= set(window_of(tensor, turn=turn, nbytes=nbytes)[0].reshape(-1).tolist())
    assert len(seen) == tensor.numel()
