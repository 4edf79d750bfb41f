"""The erasure code of one stripe: k data columns, m parity rows, any k fragments suffice. Pure.

Reed-Solomon over GF(256) with a Cauchy matrix (m = 1: plain XOR), computed by ISA-L.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from typing_extensions import Buffer

from ckpt import isal

CODEC = "isal-cauchy-1"
"""Names matrix and field; stored where parity outlives the version that computed it."""

MAX_FRAGMENTS = 255


class Codec:
    """Encodes and decodes stripes of one shape. Fragments are numbered data first, then parity."""

    def __init__(self, k: int, m: int) -> None:
        if k < 1 or m < 0 or k + m > MAX_FRAGMENTS:
            raise ValueError(f"no code for {k} data and {m} parity fragments (at most 255 in all)")
        self.k, self.m = k, m
        if m <= 1:
            ones = np.ones((m, k), dtype=np.uint8)
            self._matrix = np.concatenate([np.eye(k, dtype=np.uint8), ones])
        else:
            self._matrix = isal.cauchy_matrix(k + m, k)
        self._tables = [isal.encode_tables(self._matrix[k + row].tolist()) for row in range(m)]

    def encode_update(self, row: int, column: int, fragment: Buffer, into: Buffer) -> None:
        """Add data ``column`` to parity ``row``, which began as zeros; lengths are equal.

        Adding the same column twice takes it out again.
        """
        if memoryview(fragment).nbytes != memoryview(into).nbytes:
            raise ValueError("fragment and parity differ in length")
        isal.encode_update(column, fragment, self._tables[row], into)

    def coefficients(self, lost: int, have: Sequence[int]) -> list[int]:
        """Return how to combine the fragments ``have`` (k of them) into data column ``lost``."""
        if len(have) != self.k or len(set(have)) != self.k:
            raise ValueError(f"decoding needs {self.k} different fragments, got {list(have)}")
        inverse = isal.invert(np.ascontiguousarray(self._matrix[list(have)]))
        if inverse is None:
            raise ValueError(f"fragments {list(have)} do not determine the data")
        return [int(value) for value in inverse[lost]]

    def decode(self, lost: int, fragments: Mapping[int, Buffer], into: Buffer) -> None:
        """Compute data column ``lost`` from ``k`` fragments of the length of ``into``.

        Absent data columns of zeros may stand as buffers of zeros.
        """
        have = sorted(fragments)
        tables = isal.encode_tables(self.coefficients(lost, have))
        isal.encode_row([fragments[number] for number in have], tables, into)
