"""The torch dtypes that are raw bytes, their names, and integer dtypes that carry those bytes."""

from __future__ import annotations

import torch

_NAMES = [
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]

BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)
}
"""Every dtype that a checkpoint can hold, by its name in the checkpoint."""

NAME_OF: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}

_CARRIERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


def carrier(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same width that numpy and every copy kernel support."""
    return _CARRIERS[dtype.itemsize]


def as_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor``'s own elements under the carrier dtype, detached."""
    return tensor.detach().view(carrier(tensor.dtype))
