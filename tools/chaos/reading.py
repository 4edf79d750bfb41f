"""Reader of runs and histories in folders."""

from __future__ import annotations

from pathlib import Path

from holdfast.tools.chaos import prediction
from holdfast.tools.chaos.judging.checker import check
from holdfast.tools.chaos.judging.history import HistoryError, of_events, reported
from holdfast.tools.chaos.judging.result import HISTORY, RESULT, load
from holdfast.tools.chaos.report.run import ReportedRun, judged


def read(folder: Path) -> list[ReportedRun]:
    """Return the runs in a folder: it may be one, hold many, or be a history without a run.

    A run inside another run, such as its smallest repetition, does not count.

    Raises ``HistoryError`` if there is none of them, ``ResultError`` for a result that cannot be
    read.
    """
    found = sorted(path.parent for path in folder.rglob(RESULT)) if folder.is_dir() else []
    if not found:
        return [_history(folder)]
    whole = [path for path in found if not set(path.parents) & set(found)]
    return [_run(path, name=_name(path, folder)) for path in whole]


def _name(path: Path, folder: Path) -> str:
    return folder.name if path == folder else str(path.relative_to(folder))


def _run(path: Path, *, name: str) -> ReportedRun:
    result = load(path)
    events = reported(path / HISTORY) if (path / HISTORY).is_dir() else []
    return judged(
        events,
        of_events(events),
        result.verdict,
        folder=name,
        result=result,
        prediction=prediction.load(path),
    )


def _history(folder: Path) -> ReportedRun:
    events = reported(folder)
    history = of_events(events)
    if not history.commits:
        raise HistoryError(
            f"{folder}: neither a run nor a history; give the folder of `holdfast chaos run`, a "
            "folder of such folders, or the folder that HOLDFAST_HISTORY named"
        )
    return judged(events, history, check(history), folder=folder.name)
