"""The multiplication table of GF(256), as a reference for codecs."""

from __future__ import annotations

import numpy as np


def multiply(a: int, b: int) -> int:
    """Multiply in GF(256) modulo x^8 + x^4 + x^3 + x^2 + 1, the way one learns it."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a = (a << 1) ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


TABLE = np.array([[multiply(a, b) for b in range(256)] for a in range(256)], dtype=np.uint8)
