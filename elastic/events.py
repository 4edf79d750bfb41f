"""What happened in a run, as JSON lines: one file per writer, each line complete when visible."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.ckpt.types import Json

EVENTS_PATTERN = "events-*.jsonl"


def events_file(run_dir: Path, writer: str) -> Path:
    """Return the event file of a node, or of ``launcher`` or ``chaos``."""
    return run_dir / f"events-{writer}.jsonl"


class EventWriter:
    """Appends events to one file; each is a single write of a whole line."""

    def __init__(self, path: Path, *, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(
        self,
        kind: str,
        *,
        source: str,
        seat: str | None = None,
        t: float | None = None,
        fields: Mapping[str, Json] | None = None,
    ) -> None:
        """Append an event; ``t`` is wall seconds, now when not given."""
        event: dict[str, Json] = {
            "t": time.time() if t is None else t,
            "node": self._node,
            "source": source,
        }
        if seat is not None:
            event["seat"] = seat
        event["kind"] = kind
        line = msgspec.json.encode({**event, **(fields or {}), **event}) + b"\n"
        with self._lock:
            if self._fd >= 0:
                os.write(self._fd, line)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class EventReader:
    """Reads the events of all writers of a run directory, as far as they are written.

    With another ``pattern`` it reads other files of JSON lines that have a ``t`` each.
    """

    def __init__(self, run_dir: Path, *, pattern: str = EVENTS_PATTERN) -> None:
        self._run_dir, self._pattern = run_dir, pattern
        self._offsets: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        """Return the events that appeared since the last call, by time."""
        events = [
            event
            for path in sorted(self._run_dir.glob(self._pattern))
            for event in self._new_of(path)
        ]
        return sorted(events, key=lambda event: float(event["t"]))

    def _new_of(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offsets[path] = self._offsets.get(path, 0) + end
        for line in data[:end].splitlines():
            yield msgspec.json.decode(line)
