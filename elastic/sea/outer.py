"""The outer step in operations that round alike on every processor. Pure.

A fused optimizer rounds some products not at all and others once, which depends on the processor.
Here every product and every sum is an operation of its own, in float32.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from holdfast.elastic.sea.settings import Nesterov

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

_CHUNK: Final = 1 << 16
"""Elements that stay in the cache from the first operation to the last."""


def stepped(weights: Floats, momentum: Floats, gradient: Floats, outer: Nesterov) -> None:
    """Move weights and momentum by one step of Nesterov's momentum, in place.

    The arrays are float32, of one dimension, of one length; ``gradient`` is left as it is.
    """
    mu, lr = np.float32(outer.momentum), np.float32(outer.lr)
    scratch = np.empty(min(_CHUNK, len(weights)), np.float32)
    for start in range(0, len(weights), _CHUNK):
        at = slice(start, start + _CHUNK)
        g, m, w = gradient[at], momentum[at], weights[at]
        ahead = scratch[: len(w)]
        np.multiply(m, mu, out=m)
        np.add(m, g, out=m)
        np.multiply(m, mu, out=ahead)
        np.add(ahead, g, out=ahead)
        np.multiply(ahead, lr, out=ahead)
        np.subtract(w, ahead, out=w)
