"""A coordinator's journal, through which its table outlives the process that serves it.

One line per change: the CRC32 of the rest in hex, a space, JSON. A change is written before it is
made, in one call, so a killed process loses nothing that it has answered. The journal does not
survive the loss of the machine, because nothing is forced to the disk: use etcd if that matters.
Lines after a bad one are not trusted: a torn last line is cut off, any other damage is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from enum import StrEnum
from pathlib import Path

import msgspec

from holdfast.ckpt.types import learn
from holdfast.elastic.errors import CoordinatorError


class ChangeKind(StrEnum):
    """The kind of a line; BASE: all before it is dropped, ``revision`` and ``lease`` are newest."""

    PUT = "put"
    DELETE = "delete"
    GRANT = "grant"
    END = "end"
    BASE = "base"


class TableChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change of a table; each kind uses its own fields."""

    kind: ChangeKind
    key: str = ""
    value: str = ""
    revision: int = 0
    lease: int | None = None
    ttl_s: float = 0.0


class Journal:
    """The file of one table, used by one process at a time.

    Raises ``CoordinatorError`` if it cannot be opened or another process uses it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        try:
            self._fd = self._open(path)
        except OSError as error:
            raise self._error(error) from error
        self.size_bytes = os.fstat(self._fd).st_size

    def _open(self, path: Path) -> int:
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and path.samefile(f"/proc/self/fd/{fd}"):
                    return fd  # not one that was replaced meanwhile
            except BlockingIOError:
                os.close(fd)
                raise CoordinatorError(
                    f"{path}: another process serves the coordinator of this run; end it first"
                ) from None
            os.close(fd)

    def load(self) -> list[TableChange]:
        """Return all changes, in order; a torn last line is removed.

        Raises ``CoordinatorError`` if the file is damaged elsewhere.
        """
        *lines, tail = self._path.read_bytes().split(b"\n")
        changes, good_bytes = [], 0
        for number, line in enumerate(lines, start=1):
            if (change := _decode(line)) is None:
                raise CoordinatorError(
                    f"{self._path}: line {number} is damaged; remove the file to begin anew, with "
                    "a new run"
                )
            changes.append(change)
            good_bytes += len(line) + 1
        if tail:
            os.ftruncate(self._fd, good_bytes)
        self.size_bytes = good_bytes
        return changes

    def append(self, change: TableChange) -> None:
        """Write a change. If it raises ``CoordinatorError``, no part of the change is left."""
        line = _encode(change)
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(28, "only a part could be written")
        except OSError as error:
            os.ftruncate(self._fd, self.size_bytes)
            raise self._error(error) from error
        self.size_bytes += written

    def spoil(self) -> None:
        """Make the file unusable: it lacks changes that were made."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.write(self._fd, b"incomplete\n")
        self.size_bytes = 0

    def rewrite(self, changes: list[TableChange]) -> None:
        """Replace all lines atomically. If it raises ``CoordinatorError``, nothing has changed."""
        fresh = self._path.with_suffix(".new")
        try:
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            with os.fdopen(fd, "wb", closefd=False) as file:
                file.writelines(map(_encode, changes))
            fcntl.flock(fd, fcntl.LOCK_EX)
            fresh.replace(self._path)
        except OSError as error:
            raise self._error(error) from error
        os.close(self._fd)
        self._fd, self.size_bytes = fd, os.fstat(fd).st_size

    def close(self) -> None:
        """Close the file, so that another process can use it."""
        os.close(self._fd)

    def _error(self, error: OSError) -> CoordinatorError:
        return CoordinatorError(
            f"{self._path}: {error.strerror}; the coordinator makes no change that it cannot "
            "record: make room, or choose another run directory"
        )


def _encode(change: TableChange) -> bytes:
    text = msgspec.json.encode(change)
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _decode(line: bytes) -> TableChange | None:
    check, _, text = line.partition(b" ")
    if check != b"%08x" % zlib.crc32(text):
        return None
    try:
        return msgspec.json.decode(text, type=TableChange)
    except msgspec.DecodeError:
        return None


learn(globals())
