"""Plain Python values as JSON and back, without losing what JSON lacks.

None, bool, int, finite float, str, lists and dicts with string keys stand for themselves. What
JSON has no word for is an object with one key that starts with ``$``:

====================  ==========================================================
``{"$tuple": […]}``   a tuple
``{"$float": "inf"}`` a float that is infinite or not a number
``{"$map": [[k,v]]}`` a dict whose keys are not all strings in ascending order, or start with $
``{"$bytes": "…"}``   bytes, in base64
``{"$numpy": […]}``   a NumPy scalar: its dtype and its number, or ``$bytes``
``{"$python": […]}``  a value of a standard type, such as a set or a date: the name of the type and
                      its parts, see `holdfast.ckpt.python_types`
``{"$torch": […]}``   a ``torch.Size``, ``torch.dtype`` or ``torch.device``
====================  ==========================================================

JSON objects have no order here, so a dict in another order than that of its keys is a ``$map``. A
value of any other type, subclasses of these included, would come back as something else. It is
refused, except for containers that a restore refills in place (``refilled``).

Callers add their own tags through ``leaf`` (``$tensor``, ``$array`` and ``$rank`` in
``holdfast.ckpt.state.trees``).
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from enum import Enum
from itertools import pairwise
from operator import lt
from typing import Any, Final

import msgspec
import numpy as np

from holdfast.ckpt import python_types
from holdfast.ckpt.errors import CorruptError, StateError
from holdfast.ckpt.types import Json

MAX_DEPTH = 64

DIGEST: Final = "rebuilt"
"""Key of the digest in the value under the name of a tensor that the program builds again."""

_MOST_BITS: Final = 14_000
"""Python writes and reads integers of at most 4,300 digits unless it is told otherwise."""
_SHOWN: Final = 60

_NUMPY_KINDS: Final = "biufcmM"
"""The kinds of NumPy scalars that are nothing but their bytes."""

_DOUBLE_BYTES: Final = 8

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_TORCH_TYPES: Final = ("Size", "dtype", "device")

EncodeLeaf = Callable[[str, Any], Json]
DecodeLeaf = Callable[[str, Any], Any]
MakePython = Callable[[str, Any], Any]


def refuse(path: str, value: object) -> Json:
    """Raise ``StateError``: name the type of the value at ``path`` and say what to do instead."""
    remedy = (
        "give it state_dict() and load_state_dict(), turn it into tensors, arrays or plain values, "
        "or leave it out of the state"
    )
    raise StateError(
        f"{path}: cannot capture a value of type {_type_of(value)} (modules, optimizers, objects "
        "with state_dict, random generators, tensors, NumPy arrays and numbers, None, bool, int, "
        "float, str, bytes, and lists, tuples, dicts, sets, dates and the like of these can be); "
        f"{remedy}"
    )


def _type_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def is_digest(value: object) -> bool:
    """True if a saved value stands in the place of a tensor that the program builds again."""
    return isinstance(value, Mapping) and value.keys() == {DIGEST, "dtype", "shape"}


def is_plain(value: object) -> bool:
    """Say whether ``value`` holds plain values only, so that nothing in it needs a ``leaf``."""
    if value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        return True
    if isinstance(value, Mapping):
        return all(is_plain(item) for item in value.values())
    if isinstance(value, list | tuple | deque):
        return all(is_plain(item) for item in value)
    return python_types.name_of(value) is not None or _is_torchs(value)


def encode(
    value: object, path: str, *, leaf: EncodeLeaf = refuse, refilled: bool = False, depth: int = 0
) -> Json:
    """Return ``value`` as fresh JSON; ``leaf(path, value)`` encodes values that are not plain.

    With ``refilled`` mutable containers may be of any type: what they hold counts.
    """
    kind = type(value)
    if depth > MAX_DEPTH:
        raise StateError(f"{path}: nested deeper than {MAX_DEPTH} levels; flatten the value")
    if kind in _SCALARS or isinstance(value, np.generic):
        return _encode_scalar(value, path)
    if isinstance(value, str) and kind.__name__ == "TorchVersion":  # torch.__version__ is text
        return _encode_scalar(str(value), path)
    if _is_torchs(value):
        return {"$torch": [kind.__name__, _parts_of_torchs(value)]}
    inside = _Inside(path, leaf=leaf, refilled=refilled, depth=depth + 1)
    if (name := python_types.name_of(value)) is not None:
        return inside.python(name, value)
    changes = refilled and isinstance(value, MutableMapping | MutableSequence)
    if isinstance(value, Mapping) and (kind is dict or changes):
        return inside.mapping(value)
    if isinstance(value, list | tuple) and (kind in (list, tuple) or changes):
        items = [inside.item(i, item) for i, item in enumerate(value)]
        return {"$tuple": items} if kind is tuple else items
    for base in (bool, int, float, str, bytes, dict, list, tuple, Mapping):
        if isinstance(value, base):
            return _refuse_subclass(path, value, base)
    return leaf(path, value)


def _encode_scalar(value: object, path: str) -> Json:
    if isinstance(value, np.generic):
        if isinstance(value, str | bytes):
            return _encode_scalar(value.item(), path)
        return _encode_number(value, path)
    if isinstance(value, str):
        return check_text(value, path)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, int) and not isinstance(value, bool):
        return _checked_integer(value, path)
    return value


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


def _refuse_subclass(path: str, value: object, base: type) -> Json:
    kind = "dict" if base is Mapping else base.__name__
    remedy = f"give {kind}(...) of it"
    if isinstance(value, Enum):
        remedy = "give its .value"
    raise StateError(
        f"{path}: a value of type {_type_of(value)} would come back as a plain {kind}; {remedy}"
    )


class _Inside:
    """Encodes what a container at ``path`` holds."""

    def __init__(self, path: str, *, leaf: EncodeLeaf, refilled: bool, depth: int) -> None:
        self._path, self._leaf, self._refilled, self._depth = path, leaf, refilled, depth

    def item(self, key: object, value: object) -> Json:
        return encode(
            value,
            f"{self._path}.{key}",
            leaf=self._leaf,
            refilled=self._refilled,
            depth=self._depth,
        )

    def mapping(self, value: Mapping[Any, Any]) -> Json:
        for key in value:
            if type(key) in (str, int):
                _encode_scalar(key, self._path)  # before it becomes a part of a path
        items = [(key, self.item(key, item)) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key, _ in items) and all(
            lt(one, other) for (one, _), (other, _) in pairwise(items)
        ):
            return dict(items)
        return {"$map": [[self._key(key), item] for key, item in items]}

    def _key(self, key: object) -> Json:
        def refuse_key(path: str, key: object) -> Json:
            raise StateError(
                f"{path}: a dict key of type {type(key).__name__} cannot be captured; "
                "use str or int keys"
            )

        return encode(key, self._path, leaf=refuse_key, depth=self._depth)

    def python(self, name: str, value: object) -> Json:
        try:
            parts = python_types.parts_of(name, value)
        except ValueError as error:
            raise StateError(
                f"{self._path}: a {name} cannot be captured as it is: {error}"
            ) from None
        found: Json
        if isinstance(value, OrderedDict):
            pairs = [[self._key(key), self.item(key, item)] for key, item in value.items()]
            found = [pairs, self.item("__dict__", vars(value))]
        elif isinstance(value, defaultdict):
            found = [parts[0], self.mapping(value)]
        elif isinstance(value, deque):
            found = [[self.item(i, item) for i, item in enumerate(value)], value.maxlen]
        else:
            found = encode(
                parts, self._path, leaf=self._leaf, refilled=self._refilled, depth=self._depth
            )
        if name in python_types.UNORDERED:
            found.sort(key=msgspec.json.encode)
        return {python_types.TAG: [name, found]}


def _is_torchs(value: object) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ in _TORCH_TYPES


def _parts_of_torchs(value: object) -> Json:
    return list(value) if isinstance(value, tuple) else str(value).removeprefix("torch.")


def _decode_torchs(payload: Any) -> Any:
    import torch  # plain values alone need none

    try:
        name, parts = payload
        if name == "Size":
            return torch.Size(parts)
        if name == "device":
            return torch.device(parts)
        if name == "dtype" and isinstance(found := getattr(torch, parts, None), torch.dtype):
            return found
        raise ValueError("no such type")
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CorruptError(f"plain value with tag '$torch' ({payload!r}): {error}") from error


def _encode_number(value: np.generic, path: str) -> Json:
    if value.dtype.kind not in _NUMPY_KINDS:
        raise StateError(f"{path}: a NumPy value of dtype {value.dtype} cannot be captured")
    number = value.item()
    if isinstance(number, bool | int) or (
        isinstance(number, float) and math.isfinite(number) and value.itemsize <= _DOUBLE_BYTES
    ):
        return {"$numpy": [value.dtype.str, number]}
    return {"$numpy": [value.dtype.str, encode(value.tobytes(), path)]}


def no_tags(tag: str, payload: object) -> Any:
    """Raise ``CorruptError``: no version of this format has this tag."""
    raise CorruptError(f"plain value with unknown tag {tag!r} ({payload!r})")


def decode(value: Json, *, leaf: DecodeLeaf = no_tags, make: MakePython = python_types.make) -> Any:
    """Return the value that ``encode`` was given; ``leaf(tag, payload)`` decodes other tags.

    ``make(name, parts)`` makes values of Python's standard types, and raises ``ValueError``.
    """
    if isinstance(value, list):
        return [decode(item, leaf=leaf, make=make) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(item, leaf=leaf, make=make) for key, item in value.items()}
    ((tag, payload),) = value.items()
    match tag:
        case "$tuple":
            return tuple(decode(item, leaf=leaf, make=make) for item in payload)
        case "$float":
            return float(payload)
        case "$bytes":
            return base64.b64decode(payload)
        case "$numpy":
            return _decode_number(payload)
        case "$torch":
            return _decode_torchs(payload)
        case "$map" | python_types.TAG:
            try:
                if tag == "$map":
                    return {
                        decode(key, make=make): decode(item, leaf=leaf, make=make)
                        for key, item in payload
                    }
                name, parts = payload
                return make(name, decode(parts, leaf=leaf, make=make))
            except (TypeError, ValueError) as error:
                raise CorruptError(f"plain value with tag {tag!r}: {error}") from error
    return leaf(tag, payload)


def unordered(value: Json) -> Json:
    """Return encoded JSON in which equal dicts are equal, in whatever order their keys were."""
    if isinstance(value, list):
        return [unordered(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {"$map"}:
        return {key: unordered(item) for key, item in value.items()}
    pairs = [[key, unordered(item)] for key, item in value["$map"]]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$map": sorted(pairs, key=lambda pair: msgspec.json.encode(pair[0]))}


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
