"""Payloads: numbers in few bits whose weighted mean is an exact sum of integers. Pure.

A block of 256 numbers shares a scale m * 2**e, with an integer m of eight bits: a number is q * m *
2**e, with an integer q of ``bits`` bits. So the weighted sum of any number of payloads is a sum of
integers, the same in any order and grouping, on any machine. (With a scale in floating point every
product would be rounded.) Every operation on floats here rounds alike everywhere.

A payload is a row of bytes for each block, one after the other: m - 1, e, then the integers, little
endian, two to a byte with 4 bits. So a range of rows is a payload too, that of its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np

from holdfast.elastic.errors import SeaError
from holdfast.elastic.sea.outer import Floats

BLOCK: Final = 256
"""Numbers that share a scale; the last block of a tensor is filled up with zeros."""

LARGEST: Final = 2.0**120
"""Numbers beyond this are refused, as infinite ones are: no progress of a training is so large."""

WHOLE_LIMIT: Final = 1 << 31
"""The weight of a sea is below this, so that its sums stay below 2**63."""

_SMALLEST: Final = 2.0**-90
"""A scale is not made smaller than for numbers up to this; smaller ones become 0."""

_HEAD: Final = 2
_CHUNK: Final = 128
"""Rows that stay in the cache from the first operation to the last."""

_TYPES: Final[dict[int, np.dtype[Any]]] = {
    8: np.dtype("<i1"),
    16: np.dtype("<i2"),
    32: np.dtype("<i4"),
}

Data: TypeAlias = bytes | memoryview

_Rows: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
_Ints: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def rows_of(n: int) -> int:
    """Return the blocks of ``n`` numbers."""
    return -(-n // BLOCK)


def row_bytes(bits: int) -> int:
    """Return the bytes of a block."""
    return _HEAD + BLOCK * bits // 8


def nbytes(n: int, bits: int) -> int:
    """Return the size of the payload of ``n`` numbers."""
    return rows_of(n) * row_bytes(bits)


def pieces(n: int, parts: int) -> tuple[slice, ...]:
    """Return the numbers that each of ``parts`` encodes: whole blocks, as even as possible.

    The payloads of the pieces, joined, are the payload of the whole.
    """
    cuts = [rows_of(n) * part // parts * BLOCK for part in range(parts)] + [n]
    return tuple(slice(min(a, n), min(b, n)) for a, b in pairwise(cuts))


def join(parts: Sequence[bytes]) -> bytes:
    """Return the payload of a whole from those of its pieces, in order."""
    return b"".join(parts)


def encode(values: Floats, bits: int) -> bytes:
    """Return the payload of float32 numbers, of any shape.

    Raises ``SeaError`` for numbers that are not finite or beyond `LARGEST`.
    """
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    full = len(flat) // BLOCK
    out = np.empty((rows_of(len(flat)), row_bytes(bits)), np.uint8)
    whole = flat[: full * BLOCK].reshape(full, BLOCK)
    for start in range(0, full, _CHUNK):
        _encode_rows(whole[start : start + _CHUNK], out[start : min(start + _CHUNK, full)], bits)
    if full < len(out):
        last = np.zeros((1, BLOCK), np.float32)
        last[0, : len(flat) - full * BLOCK] = flat[full * BLOCK :]
        _encode_rows(last, out[full:], bits)
    return out.tobytes()


def _encode_rows(rows: Floats, out: _Rows, bits: int) -> None:
    scaled = np.abs(rows)
    peak = scaled.max(axis=1)
    if not np.all(peak <= LARGEST):
        raise SeaError(
            f"progress of {peak.max()} cannot be sent: the numbers must be finite, and at most "
            f"{LARGEST:.0g}"
        )
    # Both of the smallest m * 2**e that reaches the peak; a row of 32 bits needs no m.
    highest, digits = 2 ** (bits - 1) - 1, 0 if bits == 32 else 8
    fraction, exponent = np.frexp(np.maximum(peak.astype(np.float64), _SMALLEST) / highest)
    m = np.ceil(np.ldexp(fraction, digits))
    e = exponent - digits
    out[:, 0] = m - 1
    out[:, 1] = e.astype(np.int8).view(np.uint8)
    np.multiply(rows, (1 / np.ldexp(m, e)).astype(np.float32)[:, None], out=scaled)
    np.rint(scaled, out=scaled)
    if bits == 4:
        pairs = scaled.astype(np.int8).view(np.dtype("<u2"))
        upper = pairs >> np.uint16(4)
        upper &= np.uint16(0xF0)
        pairs &= np.uint16(0x0F)
        pairs |= upper
        out[:, _HEAD:] = pairs
    else:
        out[:, _HEAD:] = scaled.astype(_TYPES[bits]).view(np.uint8)


def value(data: Data, bits: int, n: int, rows: slice | None = None) -> Floats:
    """Return the float32 numbers of a payload of ``n``, or those of some of its blocks.

    ``rows`` is a range of blocks. Raises ``SeaError`` if the payload has another size.
    """
    found = _rows(data, bits, n)
    first, last = _range(found, rows)
    out = np.empty((last - first, BLOCK), np.float32)
    for start in range(first, last, _CHUNK):
        part = found[start : min(start + _CHUNK, last)]
        scale = np.ldexp(np.float32(1), part[:, 1].view(np.int8))
        scale *= part[:, 0].astype(np.float32) + np.float32(1)
        at = out[start - first :][: len(part)]
        np.multiply(_integers(part, bits), scale[:, None], out=at, casting="same_kind")
    return out.reshape(-1)[: max(0, min(n, last * BLOCK) - first * BLOCK)]


def mean(
    parts: Sequence[tuple[Data, int]],
    *,
    whole: int,
    bits: int,
    n: int,
    rows: slice | None = None,
) -> Floats:
    """Return the float32 mean of payloads by their weights over ``whole``, in any order the same.

    ``parts`` are payloads of ``n`` numbers, with integer weights. ``whole`` is the weight of all,
    those included that are not in ``parts``: they count as zeros. The sum is exact as far as the
    scales of a block lie within 2**20 of each other; smaller contributions are rounded, each by
    itself. Raises ``SeaError`` for weights that do not fit ``whole``, and for a wrong size.
    """
    _check_weights([weight for _, weight in parts], whole)
    found = [(_rows(data, bits, n), weight) for data, weight in parts]
    first, last = _range(np.empty((rows_of(n), 0), np.uint8), rows)
    out = np.zeros((last - first, BLOCK), np.float32)
    if found:
        for start in range(first, last, _CHUNK):
            at = slice(start, min(start + _CHUNK, last))
            chunk = [(rows[at], weight) for rows, weight in found]
            out[start - first :][: at.stop - start] = _mean_rows(chunk, whole, bits)
    return out.reshape(-1)[: max(0, min(n, last * BLOCK) - first * BLOCK)]


def _mean_rows(
    parts: Sequence[tuple[_Rows, int]], whole: int, bits: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    exponents = np.array([rows[:, 1].view(np.int8) for rows, _ in parts], np.int64)
    top = exponents.max(axis=0)
    room = 62 - bits - (0 if bits == 32 else 8) - whole.bit_length()
    low = np.maximum(exponents.min(axis=0), top - room)
    total = np.zeros((len(low), BLOCK), _sum_type(int((top - low).max()), whole, bits))
    scratch = np.empty_like(total)
    for (rows, weight), e in zip(parts, exponents, strict=True):
        shift = e - low
        m = rows[:, 0].astype(np.int64) + 1
        integers = _integers(rows, bits)
        factor = (m * weight) << np.maximum(shift, 0)
        below = np.flatnonzero(shift < 0)
        factor[below] = 0
        np.multiply(integers, factor.astype(total.dtype)[:, None], out=scratch)
        total += scratch
        if below.size:
            scaled = integers[below].astype(np.float64) * np.ldexp(m[below], shift[below])[:, None]
            total[below] += np.rint(scaled).astype(np.int64) * weight
    mean = total.astype(np.float64)
    mean *= np.ldexp(1.0, low)[:, None]
    mean /= whole
    return mean


def _sum_type(shift: int, whole: int, bits: int) -> type[np.signedinteger[Any]]:
    """Return int32 where no sum is too large for it, as it is twice as fast; else int64."""
    digits = bits - 1 + (0 if bits == 32 else 8) + whole.bit_length()
    return np.int32 if digits + shift <= 31 else np.int64


def _integers(rows: _Rows, bits: int) -> _Ints:
    """Return the integers of rows, (rows, BLOCK)."""
    body = rows[:, _HEAD:]
    if bits != 4:
        return np.ascontiguousarray(body).view(_TYPES[bits])
    pairs = body.astype(np.dtype("<u2"))
    pairs |= pairs << np.uint16(4)
    pairs &= np.uint16(0x0F0F)
    integers = pairs.view(np.int8)
    integers ^= np.int8(8)  # four bits as a number with a sign
    integers -= np.int8(8)
    return integers


def _rows(data: Data, bits: int, n: int) -> _Rows:
    found = np.frombuffer(data, np.uint8)
    if len(found) != nbytes(n, bits):
        raise SeaError(
            f"a payload has {len(found)} bytes where {n} numbers of {bits} bits need "
            f"{nbytes(n, bits)}"
        )
    return found.reshape(rows_of(n), row_bytes(bits))


def _range(found: _Rows, rows: slice | None) -> tuple[int, int]:
    first, last, _ = (rows or slice(None)).indices(len(found))
    return first, max(first, last)


def _check_weights(weights: Sequence[int], whole: int) -> None:
    if min(weights, default=1) < 1:
        raise SeaError(f"a work has the weight {min(weights)}: each has 1 or more")
    if not 1 <= whole < WHOLE_LIMIT or sum(weights) > whole:
        raise SeaError(
            f"works weigh {sum(weights)} together and the sea {whole}: the sea's weight is that of "
            f"all works or more, and below {WHOLE_LIMIT}"
        )
