"""The file of a trace: one rank in one generation, line by line, as it comes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from holdfast.elastic.loop.trace.records import LoopEntered, TraceRecord


class TraceWriter:
    """Appends records; those that come before `begin` wait, because the first line names the rank.

    A process that is killed loses no record that it has written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._waiting = folder, list[TraceRecord]()
        self._file: int | None = None

    def begin(self, entered: LoopEntered) -> None:
        """Open the file of a rank that has come to its first step."""
        if self._file is None:
            name = f"{time.time_ns()}-{entered.generation}-{entered.rank}-{entered.pid}.trace"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._folder / name, flags, 0o644)
        self.write(entered)
        while self._waiting:
            self.write(self._waiting.pop(0))

    def write(self, record: TraceRecord) -> None:
        """Append one record."""
        if self._file is None:
            self._waiting.append(record)
        else:
            os.write(self._file, msgspec.json.encode(record) + b"\n")

    def mark(self, name: str) -> bool:
        """Make a file; return False if it exists already."""
        try:
            (self._folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def is_marked(self, name: str) -> bool:
        """Return whether some process has made that file."""
        return (self._folder / name).exists()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
