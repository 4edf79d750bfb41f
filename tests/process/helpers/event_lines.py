"""A reader of a run's event files that, like a user's own, knows only lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class EventLines:
    """The events of all writers of a run directory, as far as they are written."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._seen = run_dir, dict[Path, int]()

    def new(self) -> list[dict[str, Any]]:
        """Return the events that appeared since the last call, by time."""
        found: list[dict[str, Any]] = []
        for path in sorted(self._run_dir.glob("events-*.jsonl")):
            whole = path.read_bytes()
            lines = whole[: whole.rfind(b"\n") + 1].splitlines()
            found += (json.loads(line) for line in lines[self._seen.get(path, 0) :])
            self._seen[path] = len(lines)
        return sorted(found, key=lambda event: float(event["time_s"]))
