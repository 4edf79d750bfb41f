"""The outer step in operations that round alike on every processor. Pure.

A fused optimizer rounds some products not at all and others once, which depends on the processor.
Here every product and every sum is an operation of its own, in float32. A thread may take numbers
below 2**-126 for zero (``torch.set_flush_denormal``), another may not: so sums below `SMALLEST` are
zero here. A smaller addend than 2**-126 changes no larger number.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from holdfast.elastic.sea.settings import Nesterov

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

SMALLEST: Final = 2.0**-100
"""Weights and momentum of a smaller size become zero."""

_CHUNK: Final = 1 << 16
"""Elements that stay in the cache from the first operation to the last."""


def stepped(weights: Floats, momentum: Floats, gradient: Floats, outer: Nesterov) -> None:
    """Move weights and momentum by one step of Nesterov's momentum, in place.

    The arrays are float32, of one dimension, of one length; ``gradient`` is left as it is.
    """
    mu, lr = np.float32(outer.momentum), np.float32(outer.lr)
    most = min(_CHUNK, len(weights))
    scratch, sizes, small = np.empty(most, "f4"), np.empty(most, "f4"), np.empty(most, np.bool_)
    for start in range(0, len(weights), _CHUNK):
        at = slice(start, start + _CHUNK)
        g, m, w = gradient[at], momentum[at], weights[at]
        ahead, room = scratch[: len(w)], (sizes[: len(w)], small[: len(w)])
        np.multiply(m, mu, out=m)
        np.add(m, g, out=m)
        _clear_small(m, *room)
        np.multiply(m, mu, out=ahead)
        np.add(ahead, g, out=ahead)
        _clear_small(ahead, *room)
        np.multiply(ahead, lr, out=ahead)
        np.subtract(w, ahead, out=w)
        _clear_small(w, *room)


def _clear_small(values: Floats, sizes: Floats, small: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    """Make numbers below `SMALLEST` zero; the other arrays are room of the same length."""
    np.abs(values, out=sizes)
    np.less(sizes, np.float32(SMALLEST), out=small)
    np.putmask(values, small, np.float32(0))
