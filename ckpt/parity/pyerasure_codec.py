"""The erasure code of the optional package ``pyerasure``, for study and interchange.

It is written in Python and thousands of times slower than ISA-L. Its Cauchy matrix differs from
ours, so the rows of the two codecs are not interchangeable.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from typing_extensions import Buffer

from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.native.sums import Sums
from holdfast.ckpt.parity.codec import check_columns, check_fragments, check_shape

CODEC = "pyerasure-rscauchy-1"


class PyerasureCodec:
    """A code of one shape over ``Binary8``, with the coefficients of ``RSCauchy``."""

    def __init__(self, k: int, m: int) -> None:
        check_shape(k, m)
        self.k, self.m = k, m
        self._block = _module("pyerasure.block")
        self._field = _module("pyerasure.finite_field").Binary8()
        generator = _module("pyerasure.block.generator").RSCauchy(self._field, k)
        self._rows = [bytes(generator.generate_specific(row)) for row in range(m)]

    def encode(
        self,
        columns: Sequence[Buffer],
        rows: Mapping[int, Buffer],
        *,
        before: Callable[[int, int], None] | None = None,
    ) -> dict[int, int]:
        """See `ErasureCodec.encode`."""
        check_columns(self.k, columns)
        if before is not None:
            before(0, max(memoryview(column).nbytes for column in columns))
        for row, into in rows.items():
            nbytes = memoryview(into).nbytes
            encoder = self._block.Encoder(self._field, self.k, nbytes)
            encoder.set_symbols(bytearray().join(_filled(each, nbytes) for each in columns))
            memoryview(into).cast("B")[:] = encoder.encode_symbol(self._rows[row])
        return {row: crc32c(into) for row, into in rows.items()}

    def encode_update(self, row: int, column: int, fragment: Buffer, into: Buffer) -> None:
        """See `ErasureCodec.encode_update`."""
        nbytes = memoryview(into).nbytes
        if memoryview(fragment).nbytes != nbytes:
            raise ValueError("fragment and parity differ in length")
        encoder = self._block.Encoder(self._field, 1, nbytes)
        encoder.set_symbols(bytearray(fragment))
        term = encoder.encode_symbol(self._rows[row][column : column + 1])
        target = np.frombuffer(memoryview(into), dtype=np.uint8)
        target ^= np.frombuffer(term, dtype=np.uint8)

    def decode(
        self,
        lost: int,
        fragments: Mapping[int, Buffer],
        into: Buffer,
        *,
        cuts: Sequence[int] = (),
    ) -> Sums:
        """See `ErasureCodec.decode`."""
        check_fragments(self.k, list(fragments))
        nbytes = memoryview(into).nbytes
        decoder = self._block.Decoder(self._field, self.k, nbytes)
        for number, fragment in sorted(fragments.items()):
            symbol = _filled(fragment, nbytes)  # the decoder works in it
            if number < self.k:
                decoder.decode_systematic_symbol(symbol, number)
            else:
                decoder.decode_symbol(symbol, bytearray(self._rows[number - self.k]))
        if not decoder.is_complete():
            raise ValueError(f"fragments {sorted(fragments)} do not determine the data")
        data = memoryview(decoder.block_data())
        view = memoryview(into).cast("B")
        view[:] = data[lost * nbytes : (lost + 1) * nbytes]
        parts = [crc32c(view[lo:hi]) for lo, hi in pairwise((0, *cuts, nbytes))]
        return np.array(parts, dtype=np.uint32)


def _filled(fragment: Buffer, nbytes: int) -> bytearray:
    """Return a copy of ``fragment``, extended by zeros."""
    data = bytearray(fragment)
    if len(data) > nbytes:
        raise ValueError(f"a fragment of {len(data)} bytes does not fit into {nbytes}")
    return data + bytes(nbytes - len(data))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"codec {CODEC!r} needs the package pyerasure, which is not on PyPI: install it from "
            "its maker, or use the default codec"
        ) from error
