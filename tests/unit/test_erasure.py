"""The erasure code against a naive GF(256) implementation, and any k of n fragments."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from ckpt.erasure import Codec
from ckpt.isal import cauchy_matrix

LENGTH = 300


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


def encode(k: int, m: int) -> tuple[list[bytes], list[bytearray]]:
    rng = np.random.default_rng([k, m])
    data = [rng.bytes(LENGTH) for _ in range(k)]
    codec = Codec(k, m)
    rows = [bytearray(LENGTH) for _ in range(m)]
    for column in reversed(range(k)):  # the order of contributions does not matter
        for row in range(m):
            codec.encode_update(row, column, data[column], rows[row])
    return data, rows


@pytest.mark.parametrize(("k", "m"), [(1, 1), (4, 1), (2, 2), (3, 3), (5, 2)])
def test_parity_is_what_the_textbook_says(k: int, m: int) -> None:
    data, rows = encode(k, m)
    matrix = cauchy_matrix(k + m, k)[k:] if m > 1 else np.ones((1, k), dtype=np.uint8)
    for row in range(m):
        expected = np.zeros(LENGTH, dtype=np.uint8)
        for column in range(k):
            expected ^= TABLE[matrix[row, column], np.frombuffer(data[column], dtype=np.uint8)]
        assert bytes(rows[row]) == expected.tobytes()


@pytest.mark.parametrize(("k", "m"), [(1, 1), (4, 1), (2, 2), (3, 3), (1, 4)])
def test_any_k_fragments_give_every_column_back(k: int, m: int) -> None:
    data, rows = encode(k, m)
    fragments = dict(enumerate([*data, *map(bytes, rows)]))
    for have in combinations(range(k + m), k):
        for lost in set(range(k)) - set(have):
            into = bytearray(LENGTH)
            Codec(k, m).decode(lost, {number: fragments[number] for number in have}, into)
            assert bytes(into) == data[lost]


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no code for 0 data"):
        Codec(0, 1)
    with pytest.raises(ValueError, match="needs 2 different fragments"):
        Codec(2, 1).coefficients(0, [1, 1])
