"""A reader of a run's event files that, like a user's own, knows only lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.elastic.events.log import EVENTS_PATTERN, FreshLines


class EventLines:
    """The events of all writers of a run directory, as far as they are written."""

    def __init__(self, run_dir: Path) -> None:
        self._fresh = FreshLines(run_dir, pattern=EVENTS_PATTERN)

    def new(self) -> list[dict[str, Any]]:
        """Return the events that appeared since the last call, by time."""
        found = [json.loads(line) for _, line in self._fresh.new()]
        return sorted(found, key=lambda event: float(event["time_s"]))
