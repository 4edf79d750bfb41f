"""Event files: one per node, lines of JSON, each in a single write.

The processes of a node append to the same file. One that is killed inside a write may leave the
beginning of a line, which the next event follows (`decode_line`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from holdfast.ckpt.events import Event
from holdfast.elastic.events.job import EventsLost
from holdfast.elastic.events.wire import EventFormatError, decode_line, encode

__all__ = ["EventReader"]

_log = logging.getLogger(__name__)

HISTORY_BYTES = 64 << 20
"""The most that the events of a writer take on disk, in two files: four days of a small job's
steps."""

EVENTS_PATTERN = "events-*.jsonl"
_SUFFIX, _BEFORE = ".jsonl", ".before"
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def events_file(run_dir: Path, writer: str) -> Path:
    """Return the event file of a node, or of ``launcher`` or ``chaos``."""
    return run_dir / f"events-{writer}.jsonl"


class EventWriter:
    """Appends events to one file; each is a single write of a line.

    An event that cannot be written, as on a full disk, is lost; `EventsLost` says how many were. At
    half of ``history_bytes`` the file becomes that of the writer's earlier events,
    ``NAME.before``, in place of the one there; a new file follows.
    """

    def __init__(self, path: Path, *, node: str, history_bytes: int = HISTORY_BYTES) -> None:
        self._node, self._most_bytes = node, history_bytes // 2
        self._path, self._lock = path, threading.Lock()
        self._lost = 0
        self._fd = os.open(path, _APPEND, 0o600)

    def write(self, event: Event, *, source: str) -> None:
        """Append an event of a part; its time is now where it has none."""
        whole = msgspec.structs.replace(
            event, node=self._node, source=source, time_s=event.time_s or time.time()
        )
        line = encode(whole) + b"\n"
        with self._lock:
            if self._fd < 0:
                return
            if not self._append(line):
                self._lost += 1
            elif self._lost:
                lost = EventsLost(
                    count=self._lost, node=self._node, source=source, time_s=time.time()
                )
                if self._append(encode(lost) + b"\n"):
                    self._lost = 0

    def _append(self, line: bytes) -> bool:
        """Append a line, and say whether all of it is there; a full disk must not end a job.

        The beginning of a line stays where it is: other processes append to the same file.
        """
        why = os.strerror(errno.ENOSPC)  # the reason of a write that is cut short
        try:
            if os.fstat(self._fd).st_size >= self._most_bytes:
                self._begin_anew()
            if os.write(self._fd, line) == len(line):
                return True
        except OSError as error:
            why = str(error.strerror)
        if not self._lost:
            _log.warning("%s: events are lost: %s", self._path, why)
        return False

    def _begin_anew(self) -> None:
        """Go on in another file, which another process of the node may have begun already."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another process renames it in this moment: the next event finds its new file
        name = self._path.name.removesuffix(_SUFFIX)
        with contextlib.suppress(FileNotFoundError):  # renamed before, and no other could be made
            if os.path.samestat(os.fstat(self._fd), self._path.stat()):
                self._path.replace(self._path.with_name(f"{name}{_BEFORE}{_SUFFIX}"))
        fd = os.open(self._path, _APPEND, 0o600)
        os.close(self._fd)
        self._fd = fd

    def close(self) -> None:
        """Close the file, and log how many events were lost; later ones are dropped."""
        with self._lock:
            if self._fd >= 0:
                if self._lost:
                    _log.warning("%s: events lost: %d", self._path, self._lost)
                os.close(self._fd)
                self._fd = -1


class FreshLines:
    """Reads the complete lines that appear in the files of a directory, renamed ones too.

    A call reads up to ``most_bytes`` of a file, and the rest of the line at which they end.
    """

    def __init__(self, directory: Path, *, pattern: str, most_bytes: int = -1) -> None:
        self._directory, self._pattern, self._most_bytes = directory, pattern, most_bytes
        self._offsets: dict[tuple[int, int], int] = {}
        self._before: dict[tuple[int, int], int] = {}

    def new(self) -> Iterator[tuple[Path, bytes]]:
        """Yield the lines that appeared since the last call, with their files."""
        for path, lines in self.files():
            for line in lines:
                yield path, line

    def files(self) -> Iterator[tuple[Path, Iterator[bytes]]]:
        """Yield each file with its lines that appeared since the last call.

        The lines are read from the disk as they are taken; those that are not taken come again.
        """
        known = {**self._before, **self._offsets}  # a file may have been missed while renamed
        self._before, self._offsets = self._offsets, {}
        for path in sorted(self._directory.glob(self._pattern)):
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue  # renamed in this moment: its lines come next time
            about = os.fstat(file.fileno())
            identity = about.st_dev, about.st_ino
            offset = self._offsets.get(identity, known.get(identity, 0))
            # a file that is shorter is another one with that number
            self._offsets[identity] = offset if offset <= about.st_size else 0
            yield path, self._fresh(file, identity)

    def _fresh(self, file: BinaryIO, identity: tuple[int, int]) -> Iterator[bytes]:
        with file:
            first = file.seek(self._offsets[identity])
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offsets[identity] += len(line)
                yield line[:-1]
                if 0 <= self._most_bytes <= self._offsets[identity] - first:
                    return


class EventReader:
    """Reads the events of all writers of a run directory, as far as they are written."""

    def __init__(self, run_dir: Path) -> None:
        self._lines = FreshLines(run_dir, pattern=EVENTS_PATTERN)

    def new(self) -> list[Event]:
        """Return the events that appeared since the last call, by time.

        Raises ``EventFormatError`` naming the file for a line that is no event.
        """
        found = [event for path, line in self._lines.new() for event in _events(path, line)]
        return sorted(found, key=lambda event: event.time_s)


def _events(path: Path, line: bytes) -> list[Event]:
    try:
        return decode_line(line)
    except EventFormatError as error:
        raise EventFormatError(f"{path}: {error}") from error
