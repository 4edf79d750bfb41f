"""Digests of tensors by blocks, and the plan that spreads them over many looks."""

from __future__ import annotations

import functools
from typing import Final

import torch

from holdfast.ckpt.native import isal
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.copying import resolved
from holdfast.ckpt.state.kinds.wrapped import parts_of

EVERY: Final = 16
"""Snapshots, or passes, from one comparison to the next; the first ones come sooner."""

BLOCK_BYTES: Final = 1 << 20
"""Part of a tensor that is compared as one."""

_MASK: Final = 0xFFFFFFFF
_SAMPLE_BYTES: Final = 4 << 20
_SAMPLE_TENSORS: Final = 256


def is_due(number: int) -> bool:
    """Say whether the snapshot or the pass of this ``number``, counted from 0, is compared."""
    return number % EVERY == 0 or (number < EVERY and number.bit_count() == 1)


def samples_of(nbytes: int, count: int) -> int:
    """Return into how many samples ``count`` tensors are divided, so that none takes long."""
    return max(nbytes // _SAMPLE_BYTES, count // _SAMPLE_TENSORS)


def digest(view: torch.Tensor, blocks: range) -> int:
    """Return a digest of some blocks of a tensor's elements, in C order.

    A tensor that wraps others has no elements of its own: all blocks of its parts are digested.
    """
    if (parts := parts_of(view)) is not None:
        return functools.reduce(_after, (digest(part, _every_block(part)) for part in parts), 0)
    local = resolved(view)
    nbytes, found = local.numel() * local.itemsize, 0
    flat: torch.Tensor | None = None
    if local.device.type != "cpu" or not local.is_contiguous():
        flat = torch_dtypes.as_carrier(local).reshape(-1)
    for block in blocks:
        at = block * BLOCK_BYTES
        size = min(BLOCK_BYTES, nbytes - at)
        if flat is None:
            found = _after(found, isal.crc32c_at(local.data_ptr() + at, size))
        else:
            width = flat.itemsize
            part = flat[at // width : (at + size) // width].cpu()
            found = _after(found, isal.crc32c_at(part.data_ptr(), size))
    return found & _MASK


def _after(found: int, crc: int) -> int:
    return (found * 31 + crc) & _MASK


def _every_block(tensor: torch.Tensor) -> range:
    return range(-(-tensor.nbytes // BLOCK_BYTES))
