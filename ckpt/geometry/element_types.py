"""Element types by torch's names, with their numpy and Zarr types, without torch. Pure.

numpy and the core of Zarr v3 have no bfloat16 and no float8. Such tensors appear in two ways: as
the data types of that name in Zarr's registry (`holdfast.ckpt.zarr.types` brings them to
zarr-python; TensorStore has them), or *portably* as unsigned integers of the same width, which
every reader opens. The array's attribute ``torch_dtype`` names the true type in both. The reference
map is always portable; so are ``complex32`` and ``float4_e2m1fn_x2``, which TensorStore does not
have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One element type.

    ``numpy`` is the numpy type under which the bytes are viewed, ``zarr`` the Zarr v3 name of that
    view. ``native`` is False where the view is an unsigned integer in place of the true type;
    ``registered`` is then the true type's Zarr v3 name, or None if there is none to use, and
    ``nan_bits`` the integer that is not a number, or 0 if there is none.
    """

    name: str
    numpy: str
    zarr: str
    native: bool = True
    registered: str | None = None
    nan_bits: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return np.dtype(self.numpy).itemsize

    def zarr_name(self, *, portable: bool) -> str:
        """Return the Zarr v3 name: that of the numpy view, or of the true type if it has one."""
        return self.zarr if portable else self.registered or self.zarr

    def fill(self, *, portable: bool) -> Json:
        """Return the fill value in the spelling of Zarr's metadata: NaN, where there is one.

        It never stands for data. If a file of an exported array is lost, a reader that uses the
        fill value gets NaN, not plausible zeros.
        """
        if not self.native:
            return "NaN" if self.registered and not portable else self.nan_bits
        return {"f": "NaN", "b": False, "c": ["NaN", "NaN"]}.get(np.dtype(self.numpy).kind, 0)


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
    "bfloat16": ("<u2", "uint16", "bfloat16", 0x7FC0),
    "float8_e4m3fn": ("|u1", "uint8", "float8_e4m3fn", 0x7F),
    "float8_e4m3fnuz": ("|u1", "uint8", "float8_e4m3fnuz", 0x80),
    "float8_e5m2": ("|u1", "uint8", "float8_e5m2", 0x7F),
    "float8_e5m2fnuz": ("|u1", "uint8", "float8_e5m2fnuz", 0x80),
    "float8_e8m0fnu": ("|u1", "uint8", "float8_e8m0fnu", 0xFF),
    "float4_e2m1fn_x2": ("|u1", "uint8", None, 0),
    "complex32": ("<u4", "uint32", None, 0x7E007E00),
}

DTYPES: Final[Mapping[str, DType]] = {
    **{name: DType(name=name, numpy=view, zarr=name) for name, view in _NATIVE.items()},
    **{
        name: DType(
            name=name, numpy=view, zarr=zarr, native=False, registered=registered, nan_bits=nan
        )
        for name, (view, zarr, registered, nan) in _VIEWED.items()
    },
}
"""Every element type that can be stored."""


def dtype_of(name: str, *, origin: str) -> DType:
    """Return the type called ``name``.

    Raises ``CorruptError`` naming ``origin`` for another name.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise CorruptError(
            f"{origin}: element type {name!r} is none of those this version reads "
            f"({', '.join(DTYPES)}); install the Holdfast version that wrote it"
        ) from None
