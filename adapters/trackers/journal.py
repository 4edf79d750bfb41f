"""A file of steps and their metrics, for trackers whose own files are written later."""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO

import msgspec


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: int
    metrics: dict[str, float | str]  # "nan", "inf" and "-inf" are no numbers of JSON


class StepJournal:
    """One line of JSON for each step; a line is in the file when `add` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def open(self) -> dict[int, dict[str, float]]:
        """Open the file for further steps; return those that it has, in their order.

        A last line that is torn, as by a kill, does not count and is removed.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = file = self._path.open("a+b", buffering=0)
        file.seek(0)
        known, end = dict[int, dict[str, float]](), 0
        for line in file.read().splitlines(keepends=True):
            try:
                found = msgspec.json.decode(line, type=_Line)
            except msgspec.DecodeError:
                break
            if not line.endswith(b"\n"):
                break
            known[found.step] = {name: float(each) for name, each in found.metrics.items()}
            end += len(line)
        file.truncate(end)
        return known

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Append a step."""
        assert self._file is not None, "open it first"
        values = {k: v if math.isfinite(v) else str(v) for k, v in metrics.items()}
        self._file.write(msgspec.json.encode(_Line(step, values)) + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
