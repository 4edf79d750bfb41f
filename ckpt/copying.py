"""Copy tensors to and from raw bytes, checksummed in the same pass, outside the GIL."""

from __future__ import annotations

import ctypes
from types import EllipsisType
from typing import Any

import numpy as np
import torch

from ckpt import dtypes, isal
from ckpt.layout import Box

BLOCK_BYTES = 1 << 20
"""Bytes copied before they are checksummed: they are still in the cache then."""


def version_of(tensor: torch.Tensor) -> int:
    """Return the count of in-place writes to a local tensor that autograd has seen."""
    return -1 if tensor.is_inference() else tensor._version


def copy_out(tensor: torch.Tensor, into: memoryview) -> int:
    """Copy the elements of a local tensor, in C order, into ``into``; return their CRC32C.

    A view copies its own elements only. ``into`` must be writable, and as large as the elements.
    """
    local = tensor.detach()
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    if into.nbytes != local.numel() * local.itemsize:
        raise ValueError(f"{into.nbytes} bytes of room for {local.numel()} x {local.dtype}")
    if into.nbytes == 0:
        return 0
    if local.device.type != "cpu" or not local.is_contiguous():
        room = torch.frombuffer(into, dtype=dtypes.carrier(local.dtype)).view(local.shape)
        room.copy_(dtypes.as_carrier(local))
        return isal.crc32c(into)
    source, target = local.data_ptr(), isal.address_of(into)
    crc = 0
    for at in range(0, into.nbytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, into.nbytes - at)
        ctypes.memmove(target + at, source + at, size)
        crc = isal.crc32c(into[at : at + size], crc)
    return crc


def copy_in(
    tensor: torch.Tensor, data: memoryview, *, chunk_shape: tuple[int, ...], src: Box, dst: Box
) -> None:
    """Copy region ``src`` of a chunk's bytes to region ``dst`` of a local tensor."""
    local = tensor
    whole = src.shape == chunk_shape and dst.shape == tuple(local.shape)
    if whole and local.device.type == "cpu" and local.is_contiguous():
        if data.nbytes:
            ctypes.memmove(local.data_ptr(), isal.address_of(data), data.nbytes)
        return
    carrier = dtypes.carrier(local.dtype)
    chunk = np.frombuffer(data, dtype=_NUMPY[carrier]).reshape(chunk_shape)[region(src)]
    room = dtypes.as_carrier(local)
    if local.device.type == "cpu":
        np.copyto(room.numpy()[region(dst)], chunk)
    else:
        room[region(dst)] = torch.from_numpy(chunk.copy()).to(local.device)


def region(box: Box) -> tuple[EllipsisType | slice, ...]:
    """Return what selects ``box``, as a view even in 0-D, from an array it is relative to."""
    return (..., *(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)))


_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.uint8: np.dtype("<u1"),
    torch.int16: np.dtype("<i2"),
    torch.int32: np.dtype("<i4"),
    torch.int64: np.dtype("<i8"),
    torch.complex128: np.dtype("<c16"),
}
