"""Copy of tensors to raw bytes with a checksum in the same pass, outside the GIL."""

from __future__ import annotations

import torch

from holdfast.ckpt.native import isal
from holdfast.ckpt.native.streaming import copy_run
from holdfast.ckpt.state import torch_dtypes


def copy_out(tensor: torch.Tensor, into: memoryview) -> int:
    """Copy the elements of a local tensor, in C order, into ``into``; return their CRC32C.

    Of a view only its own elements are copied. ``into`` must be writable and exactly as large as
    the elements.
    """
    local = resolved(tensor)
    if into.nbytes != local.numel() * local.itemsize:
        raise ValueError(f"{into.nbytes} bytes of room for {local.numel()} x {local.dtype}")
    if into.nbytes == 0:
        return 0
    if local.device.type != "cpu" or not local.is_contiguous():
        room_for(local, into).copy_(torch_dtypes.as_carrier(local))
        return isal.crc32c(into)
    return copy_run(local.data_ptr(), isal.address_of(into), into.nbytes)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached, with lazy conjugation and negation resolved in its bytes."""
    local = tensor.detach()
    if local.is_conj() or local.is_neg():
        local = local.resolve_conj().resolve_neg()
    return local


def room_for(tensor: torch.Tensor, into: memoryview) -> torch.Tensor:
    """Return ``into`` as a tensor with the shape and the carrier dtype of ``tensor``."""
    return torch.frombuffer(into, dtype=torch_dtypes.carrier(tensor.dtype)).view(tensor.shape)
