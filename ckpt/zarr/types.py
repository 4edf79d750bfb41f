"""bfloat16 and float8 as Zarr v3 data types of zarr-python, under the names of the Zarr registry.

The names and the spelling of fill values are those of zarr-extensions, which TensorStore reads and
writes too; in numpy the elements are those of ``ml_dtypes``. The package declares the types as
entry points of the group ``zarr.data_type``. zarr-python 3.1 collects that group but does not load
it, so a program that opens such arrays without `ckpt.open` calls `register` first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias, overload

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import DTypeJSON, HasEndianness, HasItemSize
from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry

from holdfast.ckpt.types import Json

Native: TypeAlias = np.dtype[np.generic]
Format: TypeAlias = Literal[2, 3]

_SPECIAL: Final = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass(frozen=True, kw_only=True)
class SmallFloat(ZDType[Native, np.generic], HasItemSize):
    """A floating-point type that ml_dtypes adds to numpy. Zarr v2 has no name for any of them."""

    scalar: ClassVar[type[np.generic]]

    @property
    def item_size(self) -> int:
        """Bytes per element."""
        return np.dtype(self.scalar).itemsize

    @classmethod
    def from_native_dtype(cls, dtype: Native) -> Self:
        """Return the type of a numpy dtype. Raises ``DataTypeValidationError`` for any other."""
        if dtype.type is not cls.scalar:
            raise DataTypeValidationError(f"numpy's {dtype} is not {cls._zarr_v3_name}")
        return cls()

    def to_native_dtype(self) -> Native:
        """Return numpy's dtype."""
        return np.dtype(self.scalar)

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> Self:
        raise DataTypeValidationError(f"Zarr v2 has no {cls._zarr_v3_name}; found {data!r}")

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        name = cls._zarr_v3_name
        if data not in (name, {"name": name}, {"name": name, "configuration": {}}):
            raise DataTypeValidationError(f"{data!r} is not {name!r}")
        return cls()

    @overload
    def to_json(self, zarr_format: Literal[2]) -> Any: ...

    @overload
    def to_json(self, zarr_format: Literal[3]) -> str: ...

    def to_json(self, zarr_format: Format) -> Any:
        """Return the name. Raises ``ValueError`` for Zarr v2."""
        if zarr_format != 3:
            raise ValueError(
                f"Zarr v{zarr_format} has no {self._zarr_v3_name}; write the array as Zarr v3"
            )
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return self._cast(data) is not None

    def _cast(self, data: object) -> np.generic | None:
        """Return ``data`` as a scalar; None if it is no number, or becomes inf or NaN."""
        if isinstance(data, self.scalar):
            return data
        try:
            number = float(data)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            return None
        found = float(self._make(number))
        same = np.isnan(found) == np.isnan(number) and np.isinf(found) == np.isinf(number)
        return self._make(number) if same else None

    def _make(self, number: float) -> np.generic:
        with np.errstate(all="ignore"):
            return self.scalar(number)

    def cast_scalar(self, data: object) -> np.generic:
        """Return a number as a scalar, rounded.

        Raises ``TypeError`` for a value that is no number, or that the type can show only as an
        infinity or NaN.
        """
        if (found := self._cast(data)) is None:
            raise TypeError(f"{data!r} is no number that {self._zarr_v3_name} has")
        return found

    def default_scalar(self) -> np.generic:
        """Return zero; NaN where the type has none."""
        return self._make(0.0)

    def from_json_scalar(self, data: Json, *, zarr_format: Format) -> np.generic:
        """Return a fill value: a number, ``"NaN"``, an infinity, or the bits as ``"0x7fc0"``.

        Raises ``TypeError`` or ``ValueError`` for anything else. Numbers are rounded: TensorStore
        writes 0.0 even for types without a zero.
        """
        if isinstance(data, int | float) and not isinstance(data, bool):
            return self._make(float(data))
        if not isinstance(data, str):
            raise TypeError(f"{data!r} is not a fill value of {self._zarr_v3_name}")
        if data in _SPECIAL:
            return self.cast_scalar(_SPECIAL[data])
        if not data.startswith("0x") or len(data) != 2 + 2 * self.item_size:
            raise ValueError(
                f"{data!r} is not a fill value of {self._zarr_v3_name}; it would be a number, "
                f"NaN, Infinity, -Infinity, or 0x and {2 * self.item_size} digits"
            )
        bits = np.array([int(data[2:], 16)], dtype=f"u{self.item_size}")
        found: np.generic = bits.view(np.dtype(self.scalar))[0]
        return found

    def to_json_scalar(self, data: object, *, zarr_format: Format) -> float | str:
        """Return a value for `from_json_scalar`; an unusual NaN is given by its bits."""
        value = self.cast_scalar(data)
        number = float(value)
        if np.isnan(number):
            usual = _bits(value) == _bits(self._make(_SPECIAL["NaN"]))
            return "NaN" if usual else f"0x{_bits(value):0{2 * self.item_size}x}"
        if np.isinf(number):
            return "Infinity" if number > 0 else "-Infinity"
        return number


def _bits(value: np.generic) -> int:
    return int(np.array(value).view(f"u{value.dtype.itemsize}"))


@dataclass(frozen=True, kw_only=True)
class BFloat16(SmallFloat, HasEndianness):
    """The upper half of a float32."""

    scalar = ml_dtypes.bfloat16
    dtype_cls = type(np.dtype(scalar))
    _zarr_v3_name = "bfloat16"

    def to_native_dtype(self) -> Native:
        """Return numpy's dtype in this byte order."""
        native: Native = np.dtype(self.scalar)
        return native.newbyteorder(self.endianness)

    @classmethod
    def from_native_dtype(cls, dtype: Native) -> Self:
        """Return the type of a numpy dtype, with its byte order."""
        super().from_native_dtype(dtype)
        return cls(endianness="little" if dtype == dtype.newbyteorder("<") else "big")


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(SmallFloat):
    """Four bits of exponent, three of mantissa; no infinities."""

    scalar = ml_dtypes.float8_e4m3fn
    dtype_cls = type(np.dtype(scalar))
    _zarr_v3_name = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FNUZ(SmallFloat):
    """As ``float8_e4m3fn`` with another bias, and NaN in place of the negative zero."""

    scalar = ml_dtypes.float8_e4m3fnuz
    dtype_cls = type(np.dtype(scalar))
    _zarr_v3_name = "float8_e4m3fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(SmallFloat):
    """Five bits of exponent, two of mantissa; the upper half of a float16."""

    scalar = ml_dtypes.float8_e5m2
    dtype_cls = type(np.dtype(scalar))
    _zarr_v3_name = "float8_e5m2"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2FNUZ(SmallFloat):
    """As ``float8_e5m2`` with another bias, no infinities, and NaN as the negative zero."""

    scalar = ml_dtypes.float8_e5m2fnuz
    dtype_cls = type(np.dtype(scalar))
    _zarr_v3_name = "float8_e5m2fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E8M0FNU(SmallFloat):
    """Powers of two, and NaN: neither a zero nor negative numbers. The scale of MX formats."""

    scalar = ml_dtypes.float8_e8m0fnu
    dtype_cls = type(np.dtype(scalar))
    _zarr_v3_name = "float8_e8m0fnu"


TYPES: Final[tuple[type[SmallFloat], ...]] = (
    BFloat16,
    Float8E4M3FN,
    Float8E4M3FNUZ,
    Float8E5M2,
    Float8E5M2FNUZ,
    Float8E8M0FNU,
)
"""All registered types."""


def register() -> None:
    """Register the types with zarr-python in this process; known ones are left unchanged."""
    for kind in TYPES:
        if kind._zarr_v3_name not in data_type_registry.contents:
            data_type_registry.register(kind._zarr_v3_name, kind)
