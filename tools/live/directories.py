"""The run directories of one job: one for each launcher, which is each machine.

A launcher that gives up ends its own machine's part, and writes that the job failed; the others go
on. So of several directories a failure counts once all of them have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from holdfast.ckpt.errors import NotFoundError
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import Event, JobEnded, JobStarted
from holdfast.elastic.events.log import EVENTS_PATTERN, FreshLines
from holdfast.elastic.events.wire import EventFormatError, decode_line

_AT_ONCE_BYTES: Final = 8 << 20
"""Bytes of all event files that one call reads at most, about."""

_LEAST_BYTES: Final = 64 << 10
_LAUNCHERS: Final = "events-launcher*.jsonl"
_STARTS_READ: Final = 64 << 10


class RunDirectories:
    """Reads the events of one job in all its directories as they appear.

    Raises ``NotFoundError`` for a directory that is not there or has no events of a run, and
    ``ConfigError`` for two that are of different jobs, or of which one is a copy of the other.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple({path.resolve(): path for path in paths}.values())
        files = sum(_event_files(path) for path in self.paths)
        if len(self.paths) > 1:
            _check_copies(self.paths)
            _check_jobs(self.paths)
        most_bytes = max(_AT_ONCE_BYTES // max(files, 1), _LEAST_BYTES)
        self._lines = [
            FreshLines(path, pattern=EVENTS_PATTERN, most_bytes=most_bytes) for path in self.paths
        ]
        self._endings: list[JobEnded | None] = [None] * len(self.paths)
        self.damaged = 0

    def new(self, *, confirmed: bool = True) -> Iterator[list[Event]]:
        """Yield the events that appeared since the last call, up to a bound.

        ``confirmed`` False holds a failure back even if all directories have ended: other parts of
        the job are known to go on.
        """
        for number, lines in enumerate(self._lines):
            for _, line in lines.new():
                try:
                    events = decode_line(line)
                except EventFormatError:
                    self.damaged += 1
                    continue
                yield [each for event in events for each in self._passed(number, event)]
        if confirmed and all(self._endings):
            yield [each for each in self._endings if each is not None]
            self._endings = [None] * len(self.paths)

    def _passed(self, number: int, event: Event) -> list[Event]:
        """Return the event, and one that was held back and is past; nothing if it is held back."""
        held = self._endings[number]
        match event:
            case JobStarted() if held is not None:
                self._endings[number] = None
                return [held, event]
            case JobEnded(ok=False):
                self._endings[number] = event
                return []
        return [event]


def _event_files(path: Path) -> int:
    if not path.is_dir():
        raise NotFoundError(
            f"{path}: no such directory; give the one that `holdfast run --run-dir` got"
        )
    if not (count := sum(1 for _ in path.glob(EVENTS_PATTERN))):
        raise NotFoundError(
            f"{path}: no run has written events here; give the directory that "
            "`holdfast run --run-dir` got"
        )
    return count


def _check_copies(paths: Iterable[Path]) -> None:
    """Refuse two directories with the same events, which would be counted twice."""
    known: dict[bytes, Path] = {}
    for path in paths:
        for file in sorted(path.glob(EVENTS_PATTERN)):
            with file.open("rb") as lines:
                first = lines.readline()
            if not first.endswith(b"\n"):
                continue
            if (other := known.setdefault(first, path)) != path:
                raise ConfigError(
                    f"{other} and {path} have the same events ({file.name}): give one of them"
                )


def _check_jobs(paths: Iterable[Path]) -> None:
    """Refuse directories of different jobs, as far as their launchers' starts can be read."""
    known: dict[Path, set[str]] = {path: set(_runs(path)) for path in paths}
    told = {path: runs for path, runs in known.items() if runs}
    for path, runs in told.items():
        for other, theirs in told.items():
            if not runs & theirs:
                raise ConfigError(
                    f"{path} and {other} are of different jobs ({', '.join(sorted(runs))} and "
                    f"{', '.join(sorted(theirs))}): give the directories of one job"
                )


def _runs(path: Path) -> Iterator[str]:
    for file in path.glob(_LAUNCHERS):
        with file.open("rb") as lines:
            for line in lines.readlines(_STARTS_READ):
                try:
                    events = decode_line(line.rstrip(b"\n"))
                except EventFormatError:
                    continue
                yield from (event.run for event in events if isinstance(event, JobStarted))
