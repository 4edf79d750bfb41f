"""Log files of processes: fresh lines with their times, through the file's bound."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

_STAMPED: Final = re.compile(rb"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]\d{3}Z?) ")
"""The time of a line: of a worker's (UTC) or of a sidecar's (the machine's own zone)."""


def split_time(line: bytes) -> tuple[float | None, bytes]:
    """Return the time at the beginning of a line, None without one, and the rest."""
    found = _STAMPED.match(line)
    if found is None:
        return None, line
    try:
        when = datetime.fromisoformat(found[1].decode().replace(",", "."))
    except ValueError:
        return None, line
    return when.timestamp(), line[found.end() :]


class PrintedLines:
    """Reads the lines that appear in a log, and in ``NAME.1``, which has its earlier ones.

    At its bound a log is copied to ``NAME.1`` and emptied, while its writer goes on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = -1
        self._time_s = 0.0

    def new(self, *, unfinished: bool = False) -> Iterator[tuple[float, str]]:
        """Yield the fresh lines with their times (seconds since 1970).

        A line without a time has that of the line before, or of the file's last change. With
        ``unfinished`` a last line without an end comes too.
        """
        try:
            about = self.path.stat()
        except OSError:
            return
        if self._offset < 0 or about.st_size < self._offset:
            before = self.path.with_name(f"{self.path.name}.1")
            for line, _ in _lines(before, max(self._offset, 0), unfinished=True):
                yield self._timed(line, default_s=about.st_mtime)
            self._offset = 0
        for line, length in _lines(self.path, self._offset, unfinished=unfinished):
            self._offset += length
            yield self._timed(line, default_s=about.st_mtime)

    def _timed(self, line: bytes, *, default_s: float) -> tuple[float, str]:
        time_s, rest = split_time(line)
        self._time_s = time_s or self._time_s or default_s
        return self._time_s, rest.decode(errors="replace").replace("\r", "\n").strip("\n")


def _lines(path: Path, offset: int, *, unfinished: bool) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file from an offset on, without their ends, and their lengths."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n") and not unfinished:
                return
            yield line.removesuffix(b"\n"), len(line)
