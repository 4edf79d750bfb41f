"""Copy tensors to and from raw bytes, checksummed in the same pass, outside the GIL."""

from __future__ import annotations

import ctypes

import torch

from ckpt import dtypes, isal

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
