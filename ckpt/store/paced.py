"""Parts of a file that are written no faster than a line may carry them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from typing_extensions import Buffer

_LEAST_PART_BYTES: Final = 5 << 20
"""Object stores take no smaller parts of an upload."""

_PART_S: Final = 30
"""Seconds of a part, so that its request ends long before its deadline."""


class PacedParts:
    """The bytes ``whole`` in pieces; after each ``pay`` waits as long as the pace demands.

    A store that sends parts as it pulls them takes it as any iterable. One that gathers them before
    it sends calls ``pay(nbytes)`` itself as it sends ``whole``, in parts of `part_bytes`, one
    after another.
    """

    def __init__(
        self, whole: Buffer, *, pay: Callable[[int], None], bytes_per_s: int, piece_bytes: int
    ) -> None:
        self.whole = memoryview(whole).cast("B")
        self.pay, self._bytes_per_s, self._piece_bytes = pay, bytes_per_s, piece_bytes

    def __iter__(self) -> Iterator[memoryview]:
        for at in range(0, self.whole.nbytes, self._piece_bytes):
            piece = self.whole[at : at + self._piece_bytes]
            yield piece
            self.pay(piece.nbytes)

    def part_bytes(self, most: int) -> int:
        """Return the size of an upload's parts where they are not to be larger than ``most``."""
        if not self._bytes_per_s:
            return most
        return min(most, max(_LEAST_PART_BYTES, self._bytes_per_s * _PART_S))
