"""Conversion of stored bytes to numbers that numpy can compute with, without torch.

bfloat16, float8, float4 and complex32 have no numpy type; each widens to float32 (complex64)
without loss. Other types stay unchanged.
"""

from __future__ import annotations

import functools
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.ckpt.geometry.element_types import DType

Array: TypeAlias = npt.NDArray[Any]

_FLOAT8: Final = {
    # name: exponent bits, mantissa bits, bias, kind of special values (top exponent, 0x80)
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}
"""Micikevicius et al., "FP8 Formats for Deep Learning" (2022); fnuz: Noune et al. (2022)."""

_FLOAT4: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype="<f4")
"""The magnitudes of e2m1; the fourth bit is the sign (OCP Microscaling Formats, 1.0)."""


def widened(dtype: DType) -> np.dtype[Any]:
    """Return the numpy type that `decode` gives for ``dtype``."""
    if dtype.native:
        return np.dtype(dtype.numpy)
    return np.dtype("<c8") if dtype.name == "complex32" else np.dtype("<f4")


def decode(stored: Array, dtype: DType) -> Array:
    """Return the numbers that ``stored``, in the numpy view of ``dtype``, encodes.

    The shape is the same, except that each byte of ``float4_e2m1fn_x2`` holds two numbers, low half
    first: its last dim doubles. Native types are returned as they are, without a copy.
    """
    if dtype.native:
        return stored
    if dtype.name == "bfloat16":
        return np.asarray(np.left_shift(stored.astype("<u4"), np.uint32(16)).view("<f4"))
    if dtype.name == "complex32":
        halves = np.ascontiguousarray(stored).reshape(*stored.shape, 1).view("<f2")
        return np.asarray(np.ascontiguousarray(halves.astype("<f4")).view("<c8")[..., 0])
    if dtype.name == "float4_e2m1fn_x2":
        pair = np.stack([stored & 15, stored >> 4], axis=-1)
        low = _FLOAT4[pair & 7] * np.where(pair & 8, np.float32(-1), np.float32(1))
        shape = (*stored.shape[:-1], stored.shape[-1] * 2) if stored.ndim else (2,)
        return np.asarray(low.reshape(shape))
    return np.asarray(np.take(_table(dtype.name), stored))


@functools.cache
def _table(name: str) -> Array:
    """Return the 256 numbers of a float8 type."""
    bits = np.arange(256)
    if name == "float8_e8m0fnu":  # a bare exponent; all ones is not a number
        table = np.ldexp(np.ones(256), bits - 127)
        table[255] = np.nan
        return np.asarray(table, dtype="<f4")
    exponent_bits, mantissa_bits, bias, kind = _FLOAT8[name]
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    significand = np.where(exponent == 0, 0, 1 << mantissa_bits) + mantissa
    table = np.ldexp(significand.astype(float), np.maximum(exponent, 1) - bias - mantissa_bits)
    table = np.where(bits & 0x80, -table, table)
    if kind == "fnuz":
        table[0x80] = np.nan
    elif kind == "fn":
        table[[0x7F, 0xFF]] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        table[top & (mantissa == 0) & (bits < 0x80)] = np.inf
        table[top & (mantissa == 0) & (bits >= 0x80)] = -np.inf
        table[top & (mantissa != 0)] = np.nan
    return np.asarray(table, dtype="<f4")
