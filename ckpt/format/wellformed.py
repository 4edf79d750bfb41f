"""Checks of a manifest's and an index's claims, before anything acts on them. Pure.

A checksum shows damage, not intent: anyone who can write a file can seal it too. So a file that is
read must be one that a saver can have written: nothing is allocated, opened or walked on a claim
alone. Each function returns the fault in words, or None if there is none.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Final

import msgspec

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.types import Json

MAX_DIMS: Final = 64
"""The most dims of a tensor; torch and numpy have no more."""

MAX_DEPTH: Final = 256
"""Levels of lists and objects in a plain value: ``plain.MAX_DEPTH``, tags counted."""

_LAYOUTS: Final = 16384
_MAX_BYTES: Final = 1 << 63
_SMALL_BYTES: Final = 1 << 16
_FLOATS: Final = ("inf", "-inf", "nan")
_SHOWN: Final = 60
_PYTHON_TYPES: Final = frozenset(
    (
        *("OrderedDict", "Counter", "defaultdict", "deque", "set", "frozenset", "range", "slice"),
        *("bytearray", "complex", "Decimal", "Fraction", "datetime", "date", "time", "timedelta"),
        *("UUID", "PurePosixPath", "PureWindowsPath", "Path", "BytesIO"),
    )
)
"""The names that ``$python`` may have: those of `holdfast.ckpt.python_types`."""

_NUMBER: Final = re.compile(
    r"[<>|](?P<kind>[biufcmM])(?P<size>\d{1,9})(\[\d{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
"""The dtype of a NumPy scalar."""


@lru_cache(_LAYOUTS)
def fault_of_shape(
    shape: tuple[int, ...], cell: tuple[int, ...] | None, *, itemsize: int
) -> str | None:
    """Return the fault of a tensor's shape and of the cell of its grid, if any.

    Cached: the tensors of a job have the same shapes at every save.
    """
    if len(shape) > MAX_DIMS:
        return f"shape of {len(shape)} dims, {MAX_DIMS} are possible"
    if any(n < 0 for n in shape):
        return f"shape {shape} has a negative extent"
    if prod(n for n in shape if n) * itemsize >= _MAX_BYTES:
        return f"shape {shape} is larger than any memory"
    if cell is None:
        return None
    if len(cell) != len(shape) or any(n < 1 for n in cell):
        return f"cell {cell} does not divide shape {shape}"
    if prod(cell) * itemsize >= _MAX_BYTES:
        return f"cell {cell} is larger than any memory"
    return None


def fault_of_aliases(tensors: Iterable[str], aliases: Mapping[str, str]) -> str | None:
    """Return the fault of tied names, if any: each leads to a tensor, and is none itself."""
    there = frozenset(tensors)
    for name, stored in aliases.items():
        if name in there:
            return f"aliases: {name!r} is a tensor itself"
        if stored not in there:
            return f"aliases: {name!r} leads to {stored!r}, which is no tensor of the checkpoint"
    return None


def fault_of_values(values: Mapping[str, Json]) -> str | None:
    """Return the first fault of plain values: nesting and tags (`holdfast.ckpt.state.plain`)."""
    for name, value in values.items():
        try:
            _check_value(value)
        except ValueError as error:
            return f"value {name!r}: {error}"
    return None


def _check_value(value: Json) -> None:
    """Walk a plain value without recursion. Raises ``ValueError``."""
    waiting: list[tuple[Json, int, bool]] = [(value, 0, False)]
    while waiting:
        item, depth, is_key = waiting.pop()
        if not isinstance(item, list | dict):
            continue
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, dict) and (tagged := _tag_of(item)):
            waiting += ((part, depth + 2, key) for part, key in _tagged_parts(*tagged, is_key))
        elif is_key:
            raise ValueError(f"a {_kind(item)} as the key of a dict")
        else:
            parts = item if isinstance(item, list) else item.values()
            waiting += ((part, depth + 1, False) for part in parts)


def _tag_of(item: dict[str, Json]) -> tuple[str, Json] | None:
    if len(item) != 1:
        return None
    ((tag, payload),) = item.items()
    return (tag, payload) if tag.startswith("$") else None


def _tagged_parts(tag: str, payload: Json, is_key: bool) -> Iterable[tuple[Json, bool]]:
    """Return the values inside a tagged one, each with whether it is the key of a dict."""
    match tag:
        case "$tuple" if isinstance(payload, list):
            return [(part, is_key) for part in payload]
        case "$float" if payload in _FLOATS:
            return ()
        case "$bytes":
            _bytes_in(payload)
            return ()
        case "$map" if not is_key and isinstance(payload, list):
            return [part for pair in payload for part in _key_and_value(pair)]
        case "$tensor" | "$array" | "$rank" if not is_key and isinstance(payload, str):
            return ()
        case "$numpy":
            _check_number(payload)
            return ()
        case "$data" if not is_key:
            _check_small_tensor(payload)
            return ()
        case "$python" | "$torch":
            return _parts_of_type(tag, payload)
        case "$tuple" | "$float" | "$map" | "$tensor" | "$array" | "$rank" | "$data":
            raise ValueError(f"{tag} of {_shown(payload)}")
    raise ValueError(f"unknown tag {_shown(tag)}")


def _parts_of_type(tag: str, payload: Json) -> Iterable[tuple[Json, bool]]:
    match tag, payload:
        case "$python", [str(name), parts] if name in _PYTHON_TYPES:
            return [(parts, False)]
        case "$torch", ["dtype" | "device", str()]:
            return ()
        case "$torch", ["Size", list(parts)]:
            return [(part, True) for part in parts]
    raise ValueError(f"{tag} of {_shown(payload)}")


def _key_and_value(pair: Json) -> tuple[tuple[Json, bool], tuple[Json, bool]]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"$map with {_shown(pair)} in place of a key and a value")
    return (pair[0], True), (pair[1], False)


def _bytes_in(payload: Json) -> int:
    """Return the number of bytes that a base64 text encodes."""
    try:
        if isinstance(payload, str):
            return len(base64.b64decode(payload.encode("ascii"), validate=True))
    except (binascii.Error, UnicodeEncodeError):
        pass
    raise ValueError(f"$bytes of {_shown(payload)}, which is no base64")


def _check_number(payload: Json) -> None:
    """Check a NumPy scalar: its dtype, and a number or as many bytes as that has."""
    match payload:
        case [str(kind), bool() | int() | float()] if found := _NUMBER.fullmatch(kind):
            if found["kind"] in "biuf":
                return
        case [str(kind), {"$bytes": data, **rest}] if found := _NUMBER.fullmatch(kind):
            if not rest and _bytes_in(data) == int(found["size"]):
                return
    raise ValueError(f"$numpy of {_shown(payload)}")


class _SmallTensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data: str = msgspec.field(name="$bytes")


def _check_small_tensor(payload: Json) -> None:
    try:
        tensor = msgspec.convert(payload, _SmallTensor)
        itemsize = dtype_of(tensor.dtype, origin="$data").itemsize
    except (msgspec.ValidationError, CorruptError) as error:
        raise ValueError(f"$data of {_shown(payload)}: {error}") from error
    if fault := fault_of_shape(tensor.shape, None, itemsize=itemsize):
        raise ValueError(f"$data: {fault}")
    found, wanted = _bytes_in(tensor.data), prod(tensor.shape) * itemsize
    if found != wanted or found > _SMALL_BYTES:
        raise ValueError(f"$data: {found} bytes for a tensor of shape {tensor.shape}")


def _kind(item: Json) -> str:
    return "list" if isinstance(item, list) else "dict"


def _shown(value: Json) -> str:
    if isinstance(value, list | dict):
        return f"a {_kind(value)} of {len(value)}"
    words = repr(value)
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}…"
