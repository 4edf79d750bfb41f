"""Copy tensors to raw bytes, checksummed in the same pass, outside the GIL."""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch

from ckpt import dtypes, isal

BLOCK_BYTES = 512 << 10
"""Bytes copied before they are checksummed: source and copy are still in the cache then."""

_NO_BYTES = 0xFFFFFFFF


def version_of(tensor: torch.Tensor) -> int:
    """Return the count of in-place writes to a local tensor that autograd has seen."""
    return -1 if tensor.is_inference() else tensor._version


def copy_out(tensor: torch.Tensor, into: memoryview) -> int:
    """Copy the elements of a local tensor, in C order, into ``into``; return their CRC32C.

    A view copies its own elements only. ``into`` must be writable, and as large as the elements.
    """
    local = resolved(tensor)
    if into.nbytes != local.numel() * local.itemsize:
        raise ValueError(f"{into.nbytes} bytes of room for {local.numel()} x {local.dtype}")
    if into.nbytes == 0:
        return 0
    if local.device.type != "cpu" or not local.is_contiguous():
        room_for(local, into).copy_(dtypes.as_carrier(local))
        return isal.crc32c(into)
    return copy_at(local.data_ptr(), isal.address_of(into), into.nbytes)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached, its bytes being its values (no conjugate or negative view)."""
    local = tensor.detach()
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    return local


def room_for(tensor: torch.Tensor, into: memoryview) -> torch.Tensor:
    """Return ``into`` as a tensor of the shape and carrier dtype of ``tensor``."""
    return torch.frombuffer(into, dtype=dtypes.carrier(tensor.dtype)).view(tensor.shape)


def copy_at(source: int, target: int, nbytes: int) -> int:
    """Copy memory that the caller keeps alive; return the CRC32C of what was stored."""
    crc, checksum = _NO_BYTES, isal.library().crc32_iscsi
    for at in range(0, nbytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, nbytes - at)
        ctypes.memmove(target + at, source + at, size)
        crc = checksum(target + at, size, crc)
    return int(crc) ^ _NO_BYTES


def copy_many(sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Copy many small runs of memory in one go; return the CRC32C of each.

    Keeps the GIL: giving it up for a microsecond's work costs more than the work. Pass at most
    some hundred kilobytes at a time.
    """
    memmove, checksum = _short_calls()
    deque(map(memmove, targets, sources, sizes), maxlen=0)
    return [found ^ _NO_BYTES for found in map(checksum, targets, sizes, repeat(_NO_BYTES))]


@functools.cache
def _short_calls() -> tuple[Callable[..., Any], Callable[..., int]]:
    """Return memmove and the checksum as calls that keep the GIL."""
    pointer = ctypes.c_void_p
    memmove = ctypes.PyDLL(None).memmove
    memmove.argtypes, memmove.restype = [pointer, pointer, ctypes.c_size_t], None
    checksum = ctypes.PyDLL(isal.library()._name).crc32_iscsi
    checksum.argtypes, checksum.restype = [pointer, ctypes.c_int, ctypes.c_uint32], ctypes.c_uint32
    return memmove, checksum
