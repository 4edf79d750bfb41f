"""Conversion between pushed pieces and a store that pulls the parts of a file.

A store takes a file as an iterable and pulls one part after the other; so it writes whole files
only, in bounded memory. A producer pushes a piece and continues. A `Filler` connects the two by a
`Handover`, for one file after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

from holdfast.ckpt.errors import StateError
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.store.handover import Handover

Piece: TypeAlias = tuple[str, Box]


class File(Protocol):
    """A file to be filled."""

    def pieces(self) -> Iterator[Piece]:
        """Yield its pieces, in order."""

    def fill(self, parts: Iterator[memoryview]) -> None:
        """Write it from the bytes of those pieces; runs in a separate thread."""


class Filler:
    """Fills files one after another, each from the pieces it names."""

    def __init__(self, files: Sequence[File]) -> None:
        self._files = files
        self._due: deque[tuple[int, Piece]] = deque()
        self._open: Handover | None = None
        self._at = -1

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces, in the order in which they must be pushed."""
        for number, file in enumerate(self._files):
            for piece in file.pieces():
                self._due.append((number, piece))
                yield piece

    def push(self, fqn: str, box: Box, data: memoryview) -> None:
        """Write the next piece. Raises ``StateError`` for any other."""
        number, piece = self._due.popleft() if self._due else (-1, None)
        if piece != (fqn, box):
            raise StateError(
                f"{fqn} {box} is not the next piece ({piece}); push the pieces in the order of "
                "pieces()"
            )
        self._turn_to(number)
        assert self._open is not None
        self._open.push(data)

    def _turn_to(self, number: int) -> None:
        """Complete all files before ``number``, and open that one if it exists."""
        while self._at < number:
            if self._open is not None:
                self._open.finish()
                self._open = None
            self._at += 1
            if self._at < len(self._files):
                self._open = Handover(self._files[self._at].fill)

    def finish(self) -> None:
        """Complete all files. Raises ``StateError`` if a piece was not pushed."""
        if self._due:
            raise StateError(
                f"{self._due[0][1]} and {len(self._due) - 1} more pieces were never pushed"
            )
        self._turn_to(len(self._files))

    def abandon(self) -> None:
        """Drop the file that is being written; complete files stay."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.abandon()
