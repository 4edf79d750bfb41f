"""Fixed-point sums and rounding to a grid in one pass over the numbers, by compiled functions.

`_grid.c` does the work for contiguous float32 numbers in the memory of the CPU; it is compiled when
the package is installed. Its results have the bits of the torch operations that stand in for it
elsewhere: on devices, for other dtypes, without a compiler.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

_LIBRARY: Final = Path(__file__).with_name("_grid.so")
_INFINITY: Final = 0x7F800000
"""The bits of infinity; those of NaN are above."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions, or None if they were not compiled or cannot run here."""
    try:
        found = ctypes.CDLL(str(_LIBRARY))
    except OSError:
        return None
    if not found.grid_prepare():
        return None
    pointers, count, real = [ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_double
    for name in ("fixed_store", "fixed_add", "fixed_take"):
        function: Any = getattr(found, name)
        function.argtypes = [*pointers, ctypes.c_void_p, count, real]
        function.restype = ctypes.c_uint32
    found.fixed_mean.argtypes, found.fixed_mean.restype = [*pointers, count, real, real], None
    found.grid_round.argtypes = [*pointers, count, ctypes.c_float, ctypes.c_float]
    found.grid_round.restype = ctypes.c_uint32
    return found


def takes(values: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether the compiled functions can read these numbers."""
    return (
        type(values) is torch.Tensor  # others may have no memory
        and values.device.type == "cpu"
        and not values.requires_grad
        and values.dtype is dtype
        and values.is_contiguous()
        and library() is not None
    )


def add(
    total: torch.Tensor | None,
    values: Sequence[torch.Tensor],
    grid: int,
    *,
    room: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float] | None:
    """Add one or two tensors to ``total`` (None: nothing yet), rounded to multiples of ``2**grid``.

    ``total`` is int64 of their shape, in units of ``2**grid``; it is changed in place. A first one
    is made in ``room``, if given. Return it and the largest magnitude of ``values``, infinity if
    one is not finite; None if nothing was done because the compiled functions cannot (see `takes`).
    Numbers too large for int64 add something that `take` takes away again.
    """
    if not all(map(takes, values)) or (found := library()) is None:
        return None
    act = found.fixed_add
    if total is None:
        total = torch.empty(values[0].shape, dtype=torch.int64) if room is None else room
        act = found.fixed_store
    return total, _magnitude(_pass(act, total, values, grid))


def take(total: torch.Tensor, values: Sequence[torch.Tensor], grid: int) -> None:
    """Undo `add` of the same ``values`` on the same grid; exact whatever they are."""
    found = library()
    assert found is not None, "it has added them"
    _pass(found.fixed_take, total, values, grid)


def _pass(act: Any, total: torch.Tensor, values: Sequence[torch.Tensor], grid: int) -> int:
    """Go once over the sum and the numbers; return the bits of the largest magnitude."""
    other = values[1].data_ptr() if len(values) > 1 else None
    at = total.data_ptr(), values[0].data_ptr(), other
    bits: int = act(*at, total.numel(), 2.0**-grid)
    return bits


def mean(total: torch.Tensor, grid: int, *, terms: int) -> torch.Tensor | None:
    """Return the mean, float32, of ``terms`` numbers whose sum is ``total`` units of ``2**grid``.

    None if the compiled functions cannot.
    """
    if not takes(total, torch.int64) or (found := library()) is None:
        return None
    result = torch.empty(total.shape, dtype=torch.float32)
    found.fixed_mean(result.data_ptr(), total.data_ptr(), total.numel(), 2.0**grid, float(terms))
    return result


def rounded(values: torch.Tensor, grid: int) -> tuple[torch.Tensor, float] | None:
    """Return float32 ``values`` rounded to multiples of ``2**grid``, and the largest magnitude.

    The magnitude is that before, infinity if a number is not finite. None if the compiled functions
    cannot.
    """
    if not takes(values) or (found := library()) is None:
        return None
    result = torch.empty_like(values)
    at = result.data_ptr(), values.data_ptr()
    return result, _magnitude(found.grid_round(*at, values.numel(), 2.0**-grid, 2.0**grid))


def _magnitude(bits: int) -> float:
    """Return the float32 of these bits, infinity for NaN."""
    if bits >= _INFINITY:
        return math.inf
    found: float = struct.unpack("f", struct.pack("I", bits))[0]
    return found
