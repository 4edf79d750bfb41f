"""What a job did, as it told: the steps its ranks completed, their samples, their state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import EVENTS_PATTERN
from holdfast.tools.chaos.hooks import PATTERN
from holdfast.tools.chaos.judging.record import Consumed, History, Stated, StepCommit


class HistoryError(ConfigError):
    """A history of a job cannot be read."""

    code = "HF027"
    remedy = "Give the folder of a finished run, or mend the line that the message names."


def read(folder: Path) -> History:
    """Return the history in a folder: what hooks wrote, and the events of a Holdfast job.

    A last line that was cut off by a death is passed over. Raises ``HistoryError`` naming file and
    line for any other that is none, and for a folder without a history.
    """
    history = of_events(told(folder))
    if not history.commits:
        raise HistoryError(
            f"{folder}: no step was told here; call holdfast.chaos.step in the training loop with "
            "HOLDFAST_HISTORY naming this folder, or give the run directory of a Holdfast job"
        )
    return history


def told(folder: Path) -> list[dict[str, Any]]:
    """Return all events in a folder, of hooks and of Holdfast, by time.

    Raises ``HistoryError`` as `read` does; a folder without any has none.
    """
    if not folder.is_dir():
        raise HistoryError(f"{folder}: no such folder; check the path")
    found = [event for path in _files(folder) for event in _lines(path)]
    return sorted(found, key=lambda event: float(event["t"]))


def of_events(events: Iterable[Mapping[str, Any]]) -> History:
    """Return the history in events, by time."""
    commits: list[StepCommit] = []
    consumed: list[Consumed] = []
    states: list[Stated] = []
    for event in events:
        kind, attempt = event["kind"], event.get("attempt", event.get("generation"))
        if kind not in ("step", "samples", "state") or attempt is None or "rank" not in event:
            continue
        at = {name: event[name] for name in ("t", "step", "rank")}
        if kind == "step":
            commits.append(StepCommit(**at, attempt=attempt))
        elif kind == "samples":
            ids = tuple(event["ids"])
            consumed.append(Consumed(**at, attempt=attempt, epoch=event["epoch"], ids=ids))
        else:
            states.append(Stated(**at, attempt=attempt, digest=event["digest"]))
    return History(commits=tuple(commits), consumed=tuple(consumed), states=tuple(states))


def _files(folder: Path) -> list[Path]:
    return sorted(path for name in (PATTERN, EVENTS_PATTERN) for path in folder.rglob(name))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # behind the last newline: nothing, or a torn one
        try:
            event = msgspec.json.decode(line, type=dict[str, Any])
            if not {"t", "kind"} <= event.keys():
                raise HistoryError(f"{path}, line {number}: an event without `t` or `kind`")
        except msgspec.MsgspecError as error:
            raise HistoryError(f"{path}, line {number}: {error}") from error
        yield event
