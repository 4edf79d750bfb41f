"""The step of two islands that meet, and the bytes that they exchange. Pure.

The method is NoLoCo (Kolehmainen et al., 2025): no island ever hears from all. An island steps by
the mean progress of the two with momentum, and is drawn towards the middle of their weights, so
that islands which never meet stay together. Every operation rounds by itself, in float32.

A payload is a row of bytes for each block of 256 numbers: that of the progress, then that of the
weights, both as in `holdfast.elastic.sea.payload`. The middle of two payloads' weights is computed
from these bytes alone, so both islands find the same bits.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from holdfast.elastic.sea import payload
from holdfast.elastic.sea.outer import SMALLEST, Floats
from holdfast.elastic.sea.payload import Data
from holdfast.elastic.sea.settings import Nesterov

WEIGHT_BITS: Final = 16
"""Bits of a payload for each weight."""

_CHUNK: Final = 1 << 16
"""Elements that stay in the cache from the first operation to the last."""


def row_bytes(bits: int) -> int:
    """Return the bytes of a block, with ``bits`` for each number of the progress."""
    return payload.row_bytes(bits) + payload.row_bytes(WEIGHT_BITS)


def encode(own: Floats, weights: Floats, bits: int) -> bytes:
    """Return the payload of progress and weights, float32 of one length.

    Raises ``SeaError`` for numbers that are not finite or too large.
    """
    both = ((own, bits), (weights, WEIGHT_BITS))
    rows = [
        np.frombuffer(payload.encode(values, each), np.uint8).reshape(-1, payload.row_bytes(each))
        for values, each in both
    ]
    return np.concatenate(rows, axis=1).tobytes()


def split(data: Data, bits: int) -> tuple[bytes, bytes]:
    """Return the payload of the progress and that of the weights, of whole rows."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, row_bytes(bits))
    cut = payload.row_bytes(bits)
    return rows[:, :cut].tobytes(), rows[:, cut:].tobytes()


def met(
    weights: Floats, momentum: Floats, gradient: Floats, apart: Floats, outer: Nesterov
) -> None:
    """Move weights and momentum by a meeting, in place.

    ``gradient`` is the mean progress of the two, ``apart`` the middle of their weights less those
    that this island sent: zeros for one that is alone. All are float32 of one dimension and one
    length. The pull to the middle is 1 - momentum: with it islands come together whatever the
    momentum is; with 0.9 they go apart for a pull above 0.38.
    """
    mu, lr = np.float32(outer.momentum), np.float32(outer.lr)
    pull = np.float32(1 - outer.momentum)
    for start in range(0, len(weights), _CHUNK):
        at = slice(start, start + _CHUNK)
        step = _clear(_clear(momentum[at] * mu) - _clear(gradient[at] * lr))
        step = _clear(step + _clear(_clear(apart[at]) * pull))
        momentum[at] = step
        weights[at] = _clear(weights[at] + step)


def merged(middle: Floats, gradient: Floats, outer: Nesterov) -> Floats:
    """Return the weights of the last merge: the mean of all islands', moved by their progress."""
    return _clear(middle - _clear(gradient * np.float32(outer.lr)))


def _clear(values: Floats) -> Floats:
    """Return numbers, those below `SMALLEST` as zero: some processors take denormal ones for it."""
    values = values.copy()
    values[np.abs(values) < np.float32(SMALLEST)] = 0
    return values
