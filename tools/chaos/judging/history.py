"""Reader of a job's history: the steps that its ranks completed, their samples, their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import EventFormatError, StepDone
from holdfast.elastic.events.log import EVENTS_PATTERN, FreshLines
from holdfast.elastic.events.wire import decode_line
from holdfast.tools.chaos.hooks import PATTERN
from holdfast.tools.chaos.judging.record import (
    Consumed,
    History,
    HookLine,
    Stated,
    StepCommit,
    Told,
    time_of,
)

_Parse: TypeAlias = Callable[[bytes], Sequence[Told]]

_hook_lines: Final = msgspec.json.Decoder(HookLine)


class HistoryError(ConfigError):
    """A history of a job cannot be read."""

    code = "HF027"
    remedy = "Give the folder of a finished run, or correct the line that the message names."


def read(folder: Path) -> History:
    """Return the history in a folder: lines of hooks, and the events of a Holdfast job.

    A last line that a death cut off is skipped. Raises ``HistoryError`` with file and line for any
    other invalid line, and for a folder without a history.
    """
    history = of_events(reported(folder))
    if not history.commits:
        raise HistoryError(
            f"{folder}: no step was reported here; call holdfast.chaos.step in the training loop "
            "with HOLDFAST_HISTORY naming this folder, or give the run directory of a Holdfast "
            "job"
        )
    return history


def reported(folder: Path) -> list[Told]:
    """Return all reports of hooks and of Holdfast in a folder, by time.

    Raises ``HistoryError`` as `read` does; a folder without reports yields none.
    """
    if not folder.is_dir():
        raise HistoryError(f"{folder}: no such folder; check the path")
    hooks = (each for path in _files(folder, PATTERN) for each in _lines(path, _hook))
    events = (each for path in _files(folder, EVENTS_PATTERN) for each in _lines(path, decode_line))
    return sorted((*hooks, *events), key=time_of)


class HookReader:
    """Reads the lines of hooks in a folder, as far as they are written."""

    def __init__(self, folder: Path) -> None:
        self._lines = FreshLines(folder, pattern=PATTERN)

    def new(self) -> list[Told]:
        """Return the reports since the last call, by time. Raises ``HistoryError``."""
        found = [told for path, line in self._lines.new() for told in _parsed(path, line, _hook)]
        return sorted(found, key=time_of)


def of_events(found: Iterable[Told]) -> History:
    """Return the history in a job's reports, which are ordered by time."""
    commits: list[StepCommit] = []
    consumed: list[Consumed] = []
    states: list[Stated] = []
    for each in found:
        match each:
            case StepDone(time_s=t, step=step, rank=rank, generation=generation):
                commits.append(StepCommit(t=t, step=step, rank=rank, attempt=generation))
            case StepCommit():
                commits.append(each)
            case Consumed():
                consumed.append(each)
            case Stated():
                states.append(each)
    return History(commits=tuple(commits), consumed=tuple(consumed), states=tuple(states))


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.rglob(pattern))


def _hook(line: bytes) -> list[HookLine]:
    return [_hook_lines.decode(line)]


def _lines(path: Path, parse: _Parse) -> Iterator[Told]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # the last line is empty, or torn
        yield from _parsed(f"{path}, line {number}", line, parse)


def _parsed(origin: Path | str, line: bytes, parse: _Parse) -> Sequence[Told]:
    try:
        return parse(line)
    except (EventFormatError, msgspec.MsgspecError) as error:
        raise HistoryError(f"{origin}: {error}") from error
