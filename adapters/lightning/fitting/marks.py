"""The mark in a folder of logs: how much of them belongs to steps that were handed over whole.

A rank 0 that is killed leaves a log in which the last points may be there without a mark. Its
successor cuts them off, and gets them again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_NAME: Final = ".holdfast.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMark:
    """The run, its last step in the log, and the log's size then: rows, or bytes of each file."""

    run: str
    step: int = -1
    rows: int = 0
    files: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, run: str) -> LogMark | None:
        """Return the mark of this run in a folder; None if it has none, or that of another run."""
        place = folder / _NAME
        if not place.exists():
            return None
        found = json.loads(place.read_text())
        if found.get("run") != run:
            return None
        return cls(run=run, step=found["step"], rows=found["rows"], files=found["files"])

    def write(self, folder: Path) -> None:
        """Put the mark in place of the one before."""
        beside = folder / f"{_NAME}.new"
        text = {"run": self.run, "step": self.step, "rows": self.rows, "files": self.files}
        beside.write_text(json.dumps(text))
        beside.replace(folder / _NAME)
