"""Plain Python values as JSON and back, without losing what JSON lacks.

None, bool, int, finite float, str, lists and dicts with string keys stand for themselves. What
JSON has no word for is an object with one key that starts with ``$``:

====================  ==========================================================
``{"$tuple": […]}``   a tuple
``{"$float": "inf"}`` a float that is infinite or not a number
``{"$map": [[k,v]]}`` a dict with keys that are not all strings, or start with $
``{"$bytes": "…"}``   bytes, in base64
``{"$numpy": […]}``   a NumPy scalar: its dtype and its number, or ``$bytes``
====================  ==========================================================

Callers add their own tags through ``leaf`` (``$tensor``, ``$array`` and ``$rank`` in
``holdfast.ckpt.state.trees``).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from holdfast.ckpt.errors import CorruptError, StateError
from holdfast.ckpt.types import Json

MAX_DEPTH = 64

_MOST_BITS: Final = 14_000
"""Python writes and reads integers of at most 4,300 digits unless it is told otherwise."""
_SHOWN: Final = 60

_NUMPY_KINDS: Final = "biufcmM"
"""The kinds of NumPy scalars that are nothing but their bytes."""

_DOUBLE_BYTES: Final = 8

EncodeLeaf = Callable[[str, Any], Json]
DecodeLeaf = Callable[[str, Any], Any]


def refuse(path: str, value: object) -> Json:
    """Raise ``StateError``: name the type of the value at ``path`` and say what to do instead."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    remedy = (
        "give it state_dict() and load_state_dict(), turn it into tensors, arrays or plain values, "
        "or leave it out of the state"
    )
    raise StateError(
        f"{path}: cannot capture a value of type {kind} (modules, optimizers, objects with "
        f"state_dict, random generators, tensors, NumPy arrays and numbers, None, bool, int, "
        f"float, str, bytes, lists, tuples and dicts of them can be); {remedy}"
    )


def is_plain(value: object) -> bool:
    """Say whether ``value`` holds plain values only, so that nothing in it needs a ``leaf``."""
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        return True
    if isinstance(value, Mapping):
        return all(is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    return False


def encode(value: object, path: str, *, leaf: EncodeLeaf = refuse, depth: int = 0) -> Json:
    """Return ``value`` as fresh JSON; ``leaf(path, value)`` encodes values that are not plain."""
    if depth > MAX_DEPTH:
        raise StateError(f"{path}: nested deeper than {MAX_DEPTH} levels; flatten the value")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic) and not isinstance(value, str | bytes):
        return _encode_number(value, path)
    if isinstance(value, int):
        return _checked_integer(int(value), path)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, str):
        return check_text(str(value), path)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, leaf=leaf, depth=depth + 1)
    if isinstance(value, list | tuple):
        items = [
            encode(item, f"{path}.{i}", leaf=leaf, depth=depth + 1) for i, item in enumerate(value)
        ]
        return {"$tuple": items} if isinstance(value, tuple) else items
    return leaf(path, value)


def check_text(text: str, path: str) -> str:
    """Return ``text``. Raises ``StateError`` if it has half a character, which no file can hold."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise StateError(
                f"{path!a}: the text {text[:_SHOWN]!a} has a lone surrogate at position "
                f"{error.start}, which is no character; replace it, or keep the text as bytes"
            ) from error
    return text


def _checked_integer(value: int, path: str) -> int:
    if value.bit_length() > _MOST_BITS:
        raise StateError(
            f"{path}: an integer of {value.bit_length()} bits, at most {_MOST_BITS} can be "
            "captured; keep it as bytes: value.to_bytes(…)"
        )
    return value


def _encode_number(value: np.generic, path: str) -> Json:
    if value.dtype.kind not in _NUMPY_KINDS:
        raise StateError(f"{path}: a NumPy value of dtype {value.dtype} cannot be captured")
    number = value.item()
    if isinstance(number, bool | int) or (
        isinstance(number, float) and math.isfinite(number) and value.itemsize <= _DOUBLE_BYTES
    ):
        return {"$numpy": [value.dtype.str, number]}
    return {"$numpy": [value.dtype.str, encode(value.tobytes(), path)]}


def _encode_mapping(value: Mapping[Any, Any], path: str, *, leaf: EncodeLeaf, depth: int) -> Json:
    for key in value:
        if key is not None and not isinstance(key, bool | int | float | str | tuple):
            raise StateError(
                f"{path}: a dict key of type {type(key).__name__} cannot be captured; "
                "use str or int keys"
            )
        if isinstance(key, str):
            check_text(key, path)
        elif isinstance(key, int):
            _checked_integer(key, path)
    items = [
        (key, encode(item, f"{path}.{key}", leaf=leaf, depth=depth)) for key, item in value.items()
    ]
    if all(type(key) is str and not key.startswith("$") for key, _ in items):
        return dict(items)
    return {"$map": [[encode(key, path, depth=depth), item] for key, item in items]}


def no_tags(tag: str, payload: object) -> Any:
    """Raise ``CorruptError``: no version of this format has this tag."""
    raise CorruptError(f"plain value with unknown tag {tag!r} ({payload!r})")


def decode(value: Json, *, leaf: DecodeLeaf = no_tags) -> Any:
    """Return the value that ``encode`` was given; ``leaf(tag, payload)`` decodes other tags."""
    if isinstance(value, list):
        return [decode(item, leaf=leaf) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(item, leaf=leaf) for key, item in value.items()}
    ((tag, payload),) = value.items()
    match tag:
        case "$tuple":
            return tuple(decode(item, leaf=leaf) for item in payload)
        case "$float":
            return float(payload)
        case "$bytes":
            return base64.b64decode(payload)
        case "$numpy":
            return _decode_number(payload)
        case "$map":
            return {decode(key): decode(item, leaf=leaf) for key, item in payload}
    return leaf(tag, payload)


def _decode_number(payload: Any) -> np.generic:
    try:
        kind, number = payload
        dtype = np.dtype(kind)
        if dtype.kind not in _NUMPY_KINDS:
            raise ValueError(f"dtype {dtype}")
        if isinstance(number, bool | int | float):
            array = np.array([number], dtype=dtype)
        else:
            array = np.frombuffer(decode(number), dtype=dtype)
        found: np.generic = array[0]
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise CorruptError(f"plain value with tag '$numpy' ({payload!r}): {error}") from error
    return found
