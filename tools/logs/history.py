"""The history of a run directory, read as it grows: the events and output of all processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from holdfast.elastic.events import EventFormatError, JobEnded, JobStarted, WorkerStarted
from holdfast.elastic.events.log import EVENTS_PATTERN, FreshLines
from holdfast.elastic.events.wire import decode_line
from holdfast.tools.logs.entries import DAMAGED, OUTPUT, HistoryLine, merged
from holdfast.tools.logs.printed import PrintedLines
from holdfast.tools.show.levels import Importance

_SIDECAR, _PRELOAD = "sidecar-", "preload-"


class RunHistory:
    """Reads the events and the output of a run, from the oldest that is kept.

    ``ended`` says whether the launcher's last word so far is that the job is over.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._events = FreshLines(run_dir, pattern=EVENTS_PATTERN)
        self._logs: dict[Path, PrintedLines] = {}
        self._places: dict[str, str] = {}
        self.ended = False

    def new(self, *, unfinished: bool = False) -> Iterator[HistoryLine]:
        """Yield what appeared since the last call, by time; the files are read as it is taken.

        ``unfinished`` as in `PrintedLines.new`. A line that is no event is an entry that says so.
        """
        files: list[Iterable[HistoryLine]] = [
            _entries(path, lines) for path, lines in self._events.files()
        ]
        for path in sorted((self._run_dir / "logs").glob("*.log")):
            log = self._logs.setdefault(path, PrintedLines(path))
            files.append(self._printed(log, unfinished=unfinished))
        for entry in merged(files):
            match entry.event:
                case JobStarted():
                    self.ended = False
                case JobEnded():
                    self.ended = True
                case WorkerStarted(seat=seat, node=node):
                    self._places[seat] = node
                case None if not entry.node:
                    yield _placed(entry, self._places.get(entry.seat, ""))
                    continue
            yield entry

    def _printed(self, log: PrintedLines, *, unfinished: bool) -> Iterator[HistoryLine]:
        node, seat = _writer(log.path.stem)
        for time_s, line in log.new(unfinished=unfinished):
            yield HistoryLine(
                time_s=time_s,
                node=node,
                seat=seat,
                kind=OUTPUT,
                level=Importance.INFO,
                text=line,
            )


def _entries(path: Path, lines: Iterable[bytes]) -> Iterator[HistoryLine]:
    last_s = 0.0
    writer = path.name.removeprefix("events-").removesuffix(".jsonl").removesuffix(".before")
    for line in lines:
        try:
            found = [HistoryLine.of(event) for event in decode_line(line)]
        except EventFormatError as error:
            found = [
                HistoryLine(
                    time_s=last_s,
                    node=writer,
                    seat="",
                    kind=DAMAGED,
                    level=Importance.WARNING,
                    text=f"a line of {path.name} cannot be read: {error}",
                )
            ]
        for entry in found:
            last_s = entry.time_s
            yield entry


def _writer(name: str) -> tuple[str, str]:
    """Return node and seat of the process that writes ``NAME.log``; node "" for a worker."""
    for prefix in (_SIDECAR, _PRELOAD):
        if name.startswith(prefix):
            return name.removeprefix(prefix), prefix[:-1]
    role, _, number = name.rpartition("-")
    if role and number.isdecimal():
        return "", f"{role}/{number}"
    return "launcher", name


def _placed(entry: HistoryLine, node: str) -> HistoryLine:
    """Return a worker's line with its node, as the events before it tell; "?" if none does."""
    return HistoryLine(
        time_s=entry.time_s,
        node=node or "?",
        seat=entry.seat,
        kind=entry.kind,
        level=entry.level,
        text=entry.text,
    )
