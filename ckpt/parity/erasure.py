"""The erasure code of one stripe: k data columns, m parity rows, any k fragments suffice.

Reed-Solomon over GF(256) with a Cauchy matrix (m = 1: plain XOR; k = 1: plain copies), computed by
ISA-L: the code of Blömer et al., "An XOR-Based Erasure-Resilient Coding Scheme", ICSI TR-95-048,
1995. Other codecs are selected by name; a parity row records the name of the one that computed it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from typing_extensions import Buffer

from holdfast.ckpt.native import isal
from holdfast.ckpt.native.sums import Sums
from holdfast.ckpt.parity import pyerasure_codec
from holdfast.ckpt.parity.codec import ErasureCodec, check_columns, check_fragments, check_shape
from holdfast.ckpt.parity.combining import combine

CODEC = "isal-cauchy-1"
"""Name of matrix and field; stored where parity outlives the version that computed it."""


class ErasureCode:
    """The code computed by ISA-L: one pass over the data, without the GIL and without copies."""

    def __init__(self, k: int, m: int) -> None:
        check_shape(k, m)
        self.k, self.m = k, m
        if m <= 1 or k == 1:
            ones = np.ones((m, k), dtype=np.uint8)
            self._matrix = np.concatenate([np.eye(k, dtype=np.uint8), ones])
        else:
            self._matrix = isal.cauchy_matrix(k + m, k)
        self._tables = [isal.encode_tables(self._matrix[k + row]) for row in range(m)]
        self._inverted: dict[tuple[int, tuple[int, ...]], isal.Bytes] = {}

    def encode(
        self,
        columns: Sequence[Buffer],
        rows: Mapping[int, Buffer],
        *,
        before: Callable[[int, int], None] | None = None,
    ) -> dict[int, int]:
        """See `ErasureCodec.encode`."""
        check_columns(self.k, columns)
        if not rows:
            return {}
        wanted = self._matrix[[self.k + row for row in rows]]
        sums = combine(wanted, columns, list(rows.values()), before=before)
        return dict(zip(rows, sums[:, 0].tolist(), strict=True))

    def encode_update(self, row: int, column: int, fragment: Buffer, into: Buffer) -> None:
        """See `ErasureCodec.encode_update`."""
        if memoryview(fragment).nbytes != memoryview(into).nbytes:
            raise ValueError("fragment and parity differ in length")
        isal.encode_update(column, fragment, self._tables[row], into)

    def coefficients(self, lost: int, have: tuple[int, ...]) -> isal.Bytes:
        """Return coefficients, shape (1, k), that make column ``lost`` of fragments ``have``."""
        if (lost, have) not in self._inverted:
            self._inverted[lost, have] = self._invert(lost, have)
        return self._inverted[lost, have]

    def _invert(self, lost: int, have: tuple[int, ...]) -> isal.Bytes:
        check_fragments(self.k, have)
        inverse = isal.invert(np.ascontiguousarray(self._matrix[list(have)]))
        if inverse is None:
            raise ValueError(f"fragments {list(have)} do not determine the data")
        return inverse[lost : lost + 1]

    def decode(
        self,
        lost: int,
        fragments: Mapping[int, Buffer],
        into: Buffer,
        *,
        cuts: Sequence[int] = (),
    ) -> Sums:
        """See `ErasureCodec.decode`."""
        have = tuple(sorted(fragments))
        sources = [fragments[number] for number in have]
        sums: Sums = combine(self.coefficients(lost, have), sources, [into], cuts=cuts)[0]
        return sums


_isal_codec = functools.cache(ErasureCode)


@functools.cache
def codec_named(name: str = CODEC) -> Callable[[int, int], ErasureCodec]:
    """Return the constructor of a codec by its name; it keeps one codec per shape ``(k, m)``.

    Raises ``ValueError`` for an unknown name, and ``ImportError`` with the remedy where the package
    of an optional codec is missing.
    """
    if name == CODEC:
        return _isal_codec
    if name == pyerasure_codec.CODEC:
        return functools.cache(pyerasure_codec.PyerasureCodec)
    raise ValueError(f"no erasure codec {name!r}: give {CODEC!r} or {pyerasure_codec.CODEC!r}")
