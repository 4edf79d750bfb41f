"""The interface of an erasure code of one shape, and the checks that every codec makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from typing_extensions import Buffer

from holdfast.ckpt.native.sums import Sums

MAX_FRAGMENTS = 255


class ErasureCodec(Protocol):
    """A code of one shape. Fragments are numbered data first, then parity."""

    k: int
    m: int

    def encode(
        self,
        columns: Sequence[Buffer],
        rows: Mapping[int, Buffer],
        *,
        before: Callable[[int, int], None] | None = None,
    ) -> dict[int, int]:
        """Overwrite parity ``rows`` (number → buffer) with what all ``k`` columns make of them.

        The rows are of one length; a shorter column stands for one with zeros behind it. Returns
        the CRC32C of each row. ``before(lo, hi)`` is called before those bytes of the columns are
        used; what it raises is passed on, and the rows are void. Raises ``ValueError`` for a wrong
        number of columns, or one that is longer than the rows.
        """

    def encode_update(self, row: int, column: int, fragment: Buffer, into: Buffer) -> None:
        """Add data ``column`` to parity ``row``, which began as zeros; lengths are equal.

        Adding the same column twice takes it out again.
        """

    def decode(
        self,
        lost: int,
        fragments: Mapping[int, Buffer],
        into: Buffer,
        *,
        cuts: Sequence[int] = (),
    ) -> Sums:
        """Compute data column ``lost`` from ``k`` fragments.

        A fragment that is shorter than ``into`` stands for one with zeros behind it. Returns the
        CRC32C of the parts into which ``cuts``, in order, divide ``into``.
        """


def check_shape(k: int, m: int) -> None:
    """Raise ``ValueError`` for a shape that no code over GF(256) has."""
    if k < 1 or m < 0 or k + m > MAX_FRAGMENTS:
        raise ValueError(f"no code for {k} data and {m} parity fragments (at most 255 in all)")


def check_columns(k: int, columns: Sequence[Buffer]) -> None:
    """Raise ``ValueError`` when there are not ``k`` columns."""
    if len(columns) != k:
        raise ValueError(f"encoding needs all {k} columns, got {len(columns)}")


def check_fragments(k: int, have: Sequence[int]) -> None:
    """Raise ``ValueError`` when there are not ``k`` different fragments."""
    if len(have) != k or len(set(have)) != k:
        raise ValueError(f"decoding needs {k} different fragments, got {list(have)}")
