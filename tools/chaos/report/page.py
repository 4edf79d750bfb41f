"""The report as one HTML page that needs no network, in the style of the demo's report."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Final

from markupsafe import Markup

from holdfast.tools.chaos.report import charts as own_charts
from holdfast.tools.chaos.report.losses import OUTCOMES
from holdfast.tools.chaos.report.run import ReportedRun
from holdfast.tools.chaos.report.summary import ALL, TOTAL, RunsSummary, compare, summarise
from holdfast.tools.report import charts
from holdfast.tools.report.html import environment, seconds, style
from holdfast.tools.report.record import recovery_rows
from holdfast.tools.report.timeline import PHASES

SHOWN_MOST: Final = 12
"""Number of runs that are shown in full; runs that broke something come first."""

LISTED_MOST: Final = 500


def render(
    runs: Sequence[ReportedRun], *, against: Sequence[ReportedRun] = (), command: str = ""
) -> str:
    """Return the page of ``runs``, with the comparison to ``against``."""
    made = environment()
    made.filters["figure"] = figure
    package = files("holdfast.tools.chaos.report")
    summary = summarise(runs)
    cells = [cell for row in summary.survival.values() for cell in row]
    ordered = sorted(runs, key=lambda run: (run.held, -len(run.recoveries)))
    return made.from_string(package.joinpath("page.html.j2").read_text(encoding="utf-8")).render(
        runs=ordered[:LISTED_MOST],
        left_out=len(runs) - min(len(runs), LISTED_MOST),
        shown=[_shown(run) for run in ordered[:SHOWN_MOST]],
        summary=summary,
        against=summarise(against) if against else None,
        differences=compare(against, runs) if against else (),
        style=style() + Markup(package.joinpath("page.css").read_text(encoding="utf-8")),
        phases=[(phase, charts.PHASE_NAMES[phase]) for phase in PHASES],
        told=[phase for phase in PHASES if _is_told(summary, phase)],
        total=TOTAL,
        all=ALL,
        spreads=Markup(own_charts.spreads(summary.repairs)) if summary.repairs else "",
        bars=_bars(summary, summarise(against) if against else None),
        shares=_shares(summary),
        share_class=charts.share_class,
        outcomes=OUTCOMES,
        predicted=sum(cell.predicted is not None for cell in cells),
        differing=sum(cell.differs for cell in cells),
        headline=headline(summary),
        command=command,
    )


def headline(summary: RunsSummary) -> str:
    """Return the overall result in a few words."""
    noun = "run" if summary.runs == 1 else "runs"
    if summary.held == summary.runs:
        return f"{summary.runs} {noun}, every promise kept"
    return f"{summary.runs - summary.held} of {summary.runs} {noun} broke a promise"


def figure(value: float | None, unit: str) -> str:
    """Return a figure of a comparison with its unit."""
    if value is None:
        return "not told"
    if unit == "%":
        return f"{value:.1%}"
    return seconds(value) if unit == "s" else f"{value:g}"


def _shown(run: ReportedRun) -> dict[str, object]:
    """Return a run with its charts."""
    story = run.timeline
    broken = {violation.check for violation in run.verdict.violations}
    return {
        "run": run,
        "checks": [
            (name, None if name not in run.verdict.checked else name not in broken)
            for name in run.verdict.names
        ],
        "timeline": Markup(
            charts.timeline(story, era="generation" if run.generations else "attempt")
        )
        if story
        else "",
        "bars": Markup(charts.recovery_bars([r for r in recovery_rows(story) if r.total_s]))
        if story and run.recoveries
        else "",
    }


def _is_told(summary: RunsSummary, phase: str) -> bool:
    return any(phase in repair.phases for repair in summary.repairs)


def _bars(summary: RunsSummary, against: RunsSummary | None) -> list[tuple[str, float, Markup]]:
    pairs = [("these runs", summary), *([("those before", against)] if against else [])]
    return [
        (name, sum(each.shares.values()), Markup(charts.share_bar(each.shares)))
        for name, each in pairs
        if each.shares
    ]


def _shares(summary: RunsSummary) -> list[tuple[str, float, float]]:
    total = sum(summary.shares.values()) or 1.0
    rows = [(name, value, value / total) for name, value in summary.shares.items() if value > 0.0]
    return sorted(rows, key=lambda row: (row[0] != "productive", -row[1]))
