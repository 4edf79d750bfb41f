"""Element types by torch's names: what numpy and Zarr see of them, without importing torch. Pure.

numpy has no bfloat16 and no float8. Such tensors appear as unsigned integers of the same width,
in the reference map and in ``Checkpoint.zarr()`` alike, with the true type in the array's
attribute ``torch_dtype``: every stock reader opens them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ckpt.errors import CorruptError
from ckpt.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One element type.

    ``numpy`` is what the bytes are viewed as in numpy, ``zarr`` the Zarr v3 name of that view.
    ``native`` is False where the view is an unsigned integer in place of the true type.
    """

    name: str
    numpy: str
    zarr: str
    native: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return np.dtype(self.numpy).itemsize

    @property
    def fill(self) -> Json:
        """Zero, as Zarr's metadata spells it; it never stands for data."""
        kind = np.dtype(self.numpy).kind
        return {"f": 0.0, "b": False, "c": [0.0, 0.0]}.get(kind, 0)


_NATIVE: Final = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "|u1",
    "bool": "|b1",
    "complex64": "<c8",
    "complex128": "<c16",
}

_VIEWED: Final = {
    "bfloat16": ("<u2", "uint16"),
    "float8_e4m3fn": ("|u1", "uint8"),
    "float8_e4m3fnuz": ("|u1", "uint8"),
    "float8_e5m2": ("|u1", "uint8"),
    "float8_e5m2fnuz": ("|u1", "uint8"),
    "float8_e8m0fnu": ("|u1", "uint8"),
    "float4_e2m1fn_x2": ("|u1", "uint8"),
    "complex32": ("<u4", "uint32"),
}

DTYPES: Final[Mapping[str, DType]] = {
    **{name: DType(name=name, numpy=view, zarr=name) for name, view in _NATIVE.items()},
    **{
        name: DType(name=name, numpy=view, zarr=zarr, native=False)
        for name, (view, zarr) in _VIEWED.items()
    },
}
"""Every element type that can be stored."""


def dtype_of(name: str, *, origin: str) -> DType:
    """Return the type called ``name``. Raises ``CorruptError`` naming ``origin`` for another."""
    try:
        return DTYPES[name]
    except KeyError:
        raise CorruptError(
            f"{origin}: element type {name!r} is none of those this version reads "
            f"({', '.join(DTYPES)}); install the Holdfast version that wrote it"
        ) from None
