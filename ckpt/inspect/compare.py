"""The differences of two checkpoints: tensors element by element, plain values as trees.

Two numbers are *identical* when their bits are, and *within tolerance* when ``|a - b| <= atol +
rtol * max(|a|, |b|)``, whichever side is called A. An infinity is within tolerance of itself only.
NaN is within tolerance of NaN, whatever its bits, and of nothing else. Integers are subtracted
exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.ckpt.geometry.element_types import DType
from holdfast.ckpt.inspect.values import decode
from holdfast.ckpt.types import Json, learn

Array: TypeAlias = npt.NDArray[Any]
Number: TypeAlias = bool | int | float | str
"""A value for people and JSON; a number that JSON lacks is text, as in ``"nan"``."""

_BLOCK: Final = 1 << 17
"""The number of elements compared at once: they and the temporary results stay in the cache."""


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """The allowed distance of numbers; with both zero, only equal values are accepted."""

    rtol: float = 0.0
    atol: float = 0.0


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """Two numbers at one index, and their distance."""

    index: tuple[int, ...]
    a: Number
    b: Number
    absolute: float
    relative: float


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of differences among ``elements`` pairs of numbers.

    ``differing`` counts pairs with different bits, ``outside`` those of them that no tolerance
    covers; ``nan_a`` and ``nan_b`` those where only one side is NaN. ``first`` is the first
    difference in C order; ``largest`` and ``largest_relative`` ignore pairs with a NaN.
    """

    elements: int = 0
    differing: int = 0
    outside: int = 0
    nan_a: int = 0
    nan_b: int = 0
    first: Peak | None = None
    largest: Peak | None = None
    largest_relative: Peak | None = None


def merge(one: Tally, other: Tally) -> Tally:
    """Return the sum of two tallies; ``one`` comes first in C order."""

    def larger(key: str, measure: str) -> Peak | None:
        peaks = [peak for peak in (getattr(one, key), getattr(other, key)) if peak is not None]
        return max(peaks, key=lambda peak: getattr(peak, measure), default=None)

    return Tally(
        elements=one.elements + other.elements,
        differing=one.differing + other.differing,
        outside=one.outside + other.outside,
        nan_a=one.nan_a + other.nan_a,
        nan_b=one.nan_b + other.nan_b,
        first=one.first or other.first,
        largest=larger("largest", "absolute"),
        largest_relative=larger("largest_relative", "relative"),
    )


def tally(
    a: Array, b: Array, dtype: DType, *, tolerance: Tolerance, offset: tuple[int, ...]
) -> Tally:
    """Compare two boxes in the numpy view of ``dtype``; ``offset`` is their offset in the tensor.

    Temporary memory does not grow with the size of the boxes.
    """
    flat_a, flat_b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    found = Tally(elements=flat_a.size)
    for start in range(0, flat_a.size, _BLOCK):
        part_a, part_b = flat_a[start : start + _BLOCK], flat_b[start : start + _BLOCK]
        places = np.flatnonzero(_bits_differ(part_a, part_b))
        if places.size:
            index = _NumberPlaces(shape=a.shape, offset=offset, flat=places + start)
            block = _differences(part_a[places], part_b[places], dtype, tolerance, index)
            found = merge(found, block)
    return found


def _bits_differ(a: Array, b: Array) -> Array:
    if a.dtype.itemsize <= 8:
        bits = np.dtype(f"u{a.dtype.itemsize}")
        return np.asarray(np.not_equal(a.view(bits), b.view(bits)))
    pairs = np.not_equal(a.view("u8"), b.view("u8")).reshape(a.size, -1)
    return np.asarray(pairs.any(axis=1))


class _NumberPlaces(msgspec.Struct, frozen=True, kw_only=True):
    """The indices in the tensor of a block's numbers."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    flat: Any

    def __getitem__(self, number: int) -> tuple[int, ...]:
        inside = np.unravel_index(int(self.flat[number]), self.shape) if self.shape else ()
        return tuple(int(i) + o for i, o in zip(inside, self.offset, strict=True))


def _differences(
    a: Array, b: Array, dtype: DType, tolerance: Tolerance, places: _NumberPlaces
) -> Tally:
    """Compare numbers whose bits differ."""
    differing = a.size
    a, b = decode(a, dtype), decode(b, dtype)
    repeat = a.size // differing  # two numbers lie in a byte of float4
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    absolute = _distance(a, b)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scale = np.maximum(np.abs(a).astype(float), np.abs(b).astype(float))
        relative = np.where(absolute == 0, 0.0, absolute / scale)
        relative = np.where(np.isinf(scale) & (absolute != 0), np.inf, relative)
        near = (absolute <= tolerance.atol + tolerance.rtol * scale) & np.isfinite(absolute)
    outside = ~(near | (nan_a & nan_b))
    known = ~(nan_a | nan_b)

    def peak(number: int) -> Peak:
        return Peak(
            index=places[number // repeat],
            a=number_of(a[number]),
            b=number_of(b[number]),
            absolute=float(absolute[number]),
            relative=float(relative[number]),
        )

    def largest(measure: Array) -> Peak | None:
        return peak(int(np.argmax(np.where(known, measure, -1.0)))) if known.any() else None

    return Tally(
        differing=differing,
        outside=int(outside.reshape(-1, repeat).any(axis=1).sum()),
        nan_a=int((nan_a & ~nan_b).sum()),
        nan_b=int((nan_b & ~nan_a).sum()),
        first=peak(0),
        largest=largest(absolute),
        largest_relative=largest(relative),
    )


def _distance(a: Array, b: Array) -> Array:
    """Return ``|a - b|`` in float64; integers are subtracted exactly before they are rounded."""
    if a.dtype.kind in "iub":
        whole = np.dtype("u8") if a.dtype.kind == "u" else np.dtype("i8")
        a, b = a.astype(whole), b.astype(whole)
        low, high = np.minimum(a, b).view("u8"), np.maximum(a, b).view("u8")
        return np.asarray((high - low).astype(float))
    wide = np.dtype("c16") if a.dtype.kind == "c" else np.dtype("f8")
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(a.astype(wide) - b.astype(wide))
    return np.where(a == b, 0.0, distance)


def number_of(value: Any) -> Number:
    """Return a numpy scalar as a JSON value."""
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, complex) or (isinstance(plain, float) and not np.isfinite(plain)):
        return str(plain).strip("()")
    return plain  # type: ignore[no-any-return]


class ValueDifference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A path at which two trees of plain values differ; a side without a value is unset."""

    path: str
    a: Any = msgspec.UNSET
    b: Any = msgspec.UNSET


def compare_values(
    a: Mapping[str, Json], b: Mapping[str, Json], *, tolerance: Tolerance
) -> Iterator[ValueDifference]:
    """Yield the differences of two trees of plain values; numbers may differ by the tolerance."""
    leaves_a, leaves_b = dict(leaves(a)), dict(leaves(b))
    for path in dict.fromkeys([*leaves_a, *leaves_b]):
        if path not in leaves_b:
            yield ValueDifference(path=path, a=leaves_a[path])
        elif path not in leaves_a:
            yield ValueDifference(path=path, b=leaves_b[path])
        elif not _alike(leaves_a[path], leaves_b[path], tolerance):
            yield ValueDifference(path=path, a=leaves_a[path], b=leaves_b[path])


def leaves(value: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yield path and leaf of a stored tree; empty lists and dicts are leaves too.

    Tuples are entered like lists, all kinds of dicts alike. The tags of
    ``holdfast.ckpt.state.plain`` that hold one thing (``$float``, ``$bytes``, ``$tensor``, …)
    stay leaves.
    """
    tag = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else ""
    items: list[tuple[str, Json]] = []
    if tag == "$tuple":
        items = [(str(i), item) for i, item in enumerate(value[tag])]
    elif tag == "$map":
        items = [(_key(key), item) for key, item in value[tag]]
    elif tag == "$python":
        items = _parts(*value[tag])
    elif isinstance(value, dict) and not tag.startswith("$"):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(str(i), item) for i, item in enumerate(value)]
    if not items:
        yield path, value
    for key, item in items:
        yield from leaves(item, f"{path}.{key}" if path else key)


def _parts(name: str, parts: Json) -> list[tuple[str, Json]]:
    """Return what a container of a standard type holds, by key or position."""
    match name:
        case "OrderedDict":
            return [(_key(key), item) for key, item in parts[0]]
        case "deque":
            return [(str(i), item) for i, item in enumerate(parts[0])]
        case "Counter" | "defaultdict":
            mapping = parts if name == "Counter" else parts[1]
            pairs = mapping["$map"] if set(mapping) == {"$map"} else mapping.items()
            return [(_key(key), item) for key, item in pairs]
    return []


def _key(key: Json) -> str:
    return key if isinstance(key, str) else msgspec.json.encode(key).decode()


def _alike(a: Json, b: Json, tolerance: Tolerance) -> bool:
    if type(a) is type(b) and a == b:
        return True
    if not (isinstance(a, int | float) and isinstance(b, int | float)):
        return False
    if isinstance(a, bool) or isinstance(b, bool) or type(a) is not type(b):
        return False
    return abs(a - b) <= tolerance.atol + tolerance.rtol * max(abs(a), abs(b))


learn(globals())
