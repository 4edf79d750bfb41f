"""Conversion between pushed pieces and a store that pulls the parts of a file.

A store takes a file as an iterable and pulls one part after the other; so it writes whole files
only, in bounded memory. A producer pushes a piece and continues. A `Handover` connects the two by a
thread; a `Filler` does so for one file after another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from holdfast.ckpt.errors import InternalError, StateError
from holdfast.ckpt.geometry.layout import Box

Piece: TypeAlias = tuple[str, Box]


class _AbandonedError(InternalError):
    """Raised in the consumer, so that it unwinds and leaves nothing."""


class Handover:
    """Runs ``consume(parts)`` in a thread; `push` gives it the next part, and one part may wait."""

    def __init__(self, consume: Callable[[Iterator[memoryview]], object]) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[memoryview] = deque()
        self._ended = self._abandoned = self._gone = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(consume,), name="ckpt-fill", daemon=True
        )
        self._thread.start()

    def _run(self, consume: Callable[[Iterator[memoryview]], object]) -> None:
        try:
            consume(self._parts())
        except _AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001  raised again in the waiting thread
            self._error = error
        finally:
            with self._changed:
                self._gone = True
                self._changed.notify_all()

    def _parts(self) -> Iterator[memoryview]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended or self._abandoned)
                if self._abandoned:
                    raise _AbandonedError
                if not self._waiting:
                    return
                part = self._waiting.popleft()
                self._changed.notify_all()
            yield part
            del part

    def push(self, part: memoryview) -> None:
        """Hand over the next part; raises the consumer's error."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._gone)
            if not self._gone:
                self._waiting.append(part)
                self._changed.notify_all()
                return
        self._raise()
        raise StateError("there are more bytes than the file has room for")

    def finish(self) -> None:
        """End the parts and wait until the consumer is done; raises its error."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        self._raise()

    def abandon(self) -> None:
        """Stop the consumer and wait until it has ended."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


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
