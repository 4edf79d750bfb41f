"""Ranges of an object: cut for parallel requests, and filled block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

_LEAST_BYTES: Final = 4 << 20
_MOST_BYTES: Final = 32 << 20

Views = Sequence[memoryview]


class Sink:
    """Buffers filled one after the other; counts the filled bytes in case a reply breaks off."""

    def __init__(self, views: Views) -> None:
        self._left = [view for view in reversed(views) if view.nbytes]
        self.done, self.nbytes = 0, sum(view.nbytes for view in views)

    def take(self, block: memoryview) -> None:
        """Copy the next bytes."""
        self.done += block.nbytes
        while block.nbytes:
            view = self._left.pop()
            fits = min(view.nbytes, block.nbytes)
            view[:fits] = block[:fits]
            block = block[fits:]
            if fits < view.nbytes:
                self._left.append(view[fits:])


def ranges(views: Views, nbytes: int, *, threads: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Divide the first ``nbytes`` of ``views`` among requests; yield the start and views of each.

    There are as many as threads, unless that makes them small or large.
    """
    return _pieces(views, nbytes, min(max(-(-nbytes // threads), _LEAST_BYTES), _MOST_BYTES))


def _pieces(views: Views, nbytes: int, piece: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut the first ``nbytes`` of ``views`` into pieces; yield the start and views of each."""
    start, at, found = 0, 0, list[memoryview]()
    for view in views:
        while view.nbytes and at < nbytes:
            fits = min(view.nbytes, start + piece - at, nbytes - at)
            found.append(view[:fits])
            view, at = view[fits:], at + fits  # noqa: PLW2901 - the rest of it
            if at == start + piece or at == nbytes:
                yield start, found
                start, found = at, []
