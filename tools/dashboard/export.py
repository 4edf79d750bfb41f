"""A run as one HTML file that needs no network, in the style of the demo's report."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

from markupsafe import Markup

from holdfast.elastic.events.log import EVENTS_PATTERN, EventReader
from holdfast.elastic.events.wire import EventFormatError
from holdfast.tools.live.follow import Follower
from holdfast.tools.live.telling import partly
from holdfast.tools.live.view import Curve, RecoveryView, RunView
from holdfast.tools.report import charts
from holdfast.tools.report.html import environment, style
from holdfast.tools.report.record import RecoveryRow
from holdfast.tools.report.timeline import PHASES, build
from holdfast.tools.terminal import readable

_DETAILED_BYTES: Final = 8 << 20
_DETAILED_EVENTS: Final = 20_000
"""Runs with more events get no lane for each worker: nobody could read it."""

_CURVES: Final = 8


def write(path: Path, follower: Follower) -> None:
    """Read all that there is of a run, ask its nodes, and write the file."""
    while follower.read():
        pass
    view = follower.view()
    if view.ended_s is None:
        follower.ask()
        view = follower.view()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(view, follower.run_dirs), encoding="utf-8")


def render(view: RunView, run_dirs: Sequence[Path]) -> str:
    """Return the page; ``run_dirs`` have the single steps of a short run."""
    begin_s = view.started_s or 0.0
    source = files("holdfast.tools.dashboard").joinpath("run.html.j2").read_text(encoding="utf-8")
    made = environment()
    made.filters["size"] = lambda value: "" if value is None else readable(value)
    losses = [_row(each, begin_s) for each in view.recoveries if _is_loss(each)]
    total = sum(view.shares.values()) or 1.0
    shares = [(name, value, value / total) for name, value in view.shares.items() if value > 0.0]
    return made.from_string(source).render(
        view=view,
        begin_s=begin_s,
        style=style(),
        timeline=_timeline(run_dirs, view),
        progress=Markup(_curve(view.progress, begin_s)),
        bars=Markup(charts.recovery_bars(losses[::-1])) if losses else "",
        phases=[(phase.removesuffix("_s"), charts.PHASE_NAMES[phase]) for phase in PHASES],
        fields=PHASES,
        share_bar=Markup(charts.share_bar(view.shares)),
        shares=sorted(shares, key=lambda row: (row[0] != "productive", -row[1])),
        share_class=charts.share_class,
        curves=[
            (each.name, Markup(_curve(each, 0.0))) for each in view.curves[:_CURVES] if each.points
        ],
        partial=partly(view),
        events=sum(view.counts.values()),
    )


def _is_loss(each: RecoveryView) -> bool:
    return each.cause != "start" and each.total_s is not None


def _timeline(run_dirs: Sequence[Path], view: RunView) -> Markup | None:
    """Return the lanes of the workers, None for a run that is too long for them."""
    kept = [path for run_dir in run_dirs for path in run_dir.glob(EVENTS_PATTERN)]
    size = sum(path.stat().st_size for path in kept)
    if size > _DETAILED_BYTES or sum(view.counts.values()) > _DETAILED_EVENTS:
        return None
    try:
        events = [event for run_dir in run_dirs for event in EventReader(run_dir).new()]
    except EventFormatError:
        return None  # a damaged line, which the view has left out
    return Markup(charts.timeline(build(events))) if events else None


def _curve(curve: Curve, begin: float) -> str:
    points = [(each.at + curve.width / 2 - begin, each.mean) for each in curve.points]
    return charts.curve({"reward": points}, label=curve.name)


def _row(each: RecoveryView, begin_s: float) -> RecoveryRow:
    return RecoveryRow(
        fault=each.cause,
        victim=", ".join(each.victims[:2]),
        time=each.at_s - begin_s,
        detect_s=each.detect_s or 0.0,
        agree_s=each.agree_s or 0.0,
        reform_s=each.reform_s or 0.0,
        restore_s=each.restore_s or 0.0,
        reexecute_s=each.reexecute_s or 0.0,
        total_s=each.total_s or 0.0,
        steps_lost=each.steps_lost,
        generation=each.generation,
        restore_step=each.restore_step,
        restore_how=each.restore_how,
        note=each.reason,
    )
