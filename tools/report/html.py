"""The report as one HTML page that needs no network: styles and pictures are inline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from holdfast.tools.report import charts
from holdfast.tools.report.record import DemoReport, RecoveryRow
from holdfast.tools.report.timeline import PHASES

CHECKS: Final = {
    "exact": "Final weights equal the undisturbed run's, bit for bit",
    "ledger_ok": "Every prompt counted exactly once in the ledger",
    "steps_ok": "Both jobs completed every step",
    "faults_ok": "Every planned kill was carried out and recovered from",
    "survivors_ok": "No surviving process was restarted",
    "cleanup_ok": "No process and no shared memory left behind",
    "learned": "Held-out exact match rose",
}
"""The meaning of each key of the verdict, for a reader."""

_WINDOW: Final = 10
"""Steps in the moving mean of the reward."""

_FAULTS: Final = {
    "kill_trainer": "trainer rank killed",
    "kill_rollout": "rollout worker killed in mid-sequence",
    "kill_node": "whole node killed, its memory gone",
}


def environment() -> Environment:
    """Return the template environment of every page of a report."""
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.filters["seconds"] = seconds
    made.filters["percent"] = lambda value: f"{value:.1%}"
    return made


def style() -> Markup:
    """Return the style sheet of every page."""
    return Markup(files("holdfast.tools.report").joinpath("page.css").read_text(encoding="utf-8"))


def render(report: DemoReport) -> str:
    """Return the page of a demo."""
    source = files("holdfast.tools.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    return (
        environment()
        .from_string(source)
        .render(
            report=report,
            checks=[(CHECKS.get(key, key), passed) for key, passed in report.verdict.items()],
            style=style(),
            timeline=Markup(charts.timeline(report.timeline)),
            bars=Markup(charts.recovery_bars(report.recoveries)),
            share_bars=[
                ("hurt", report.wall_s, Markup(charts.share_bar(report.time_shares))),
                (
                    "undisturbed",
                    report.reference_wall_s,
                    Markup(charts.share_bar(report.reference_time_shares)),
                ),
            ],
            shares=_shares(report.time_shares),
            window=_WINDOW,
            share_class=charts.share_class,
            reward=Markup(_reward(report)),
            heldout=Markup(_heldout(report)),
            phases=[(phase.removesuffix("_s"), charts.PHASE_NAMES[phase]) for phase in PHASES],
            fault_words=_FAULTS,
            slowest=_slowest(report.recoveries),
            ledger=_flat(report.ledger),
            plain=_plain,
        )
    )


def seconds(value: float | None) -> str:
    """Return a duration in a readable unit."""
    if value is None:
        return "none"
    if value == 0.0:
        return "0"
    return f"{value * 1000:.0f} ms" if value < 1.0 else f"{value:.2f} s"


def _shares(shares: Mapping[str, float]) -> list[tuple[str, float, float]]:
    total = sum(shares.values()) or 1.0
    rows = [(name, value, value / total) for name, value in shares.items() if value > 0.0]
    return sorted(rows, key=lambda row: (row[0] != "productive", -row[1]))


def _slowest(rows: Sequence[RecoveryRow]) -> float | None:
    return max((row.total_s for row in rows if row.generation is not None), default=None)


def _reward(report: DemoReport) -> str:
    series = {
        "reference": _numbered(report.reference_reward),
        "reward": _numbered(report.reward),
    }
    if len(report.reward) >= 2 * _WINDOW:
        series["mean"] = _numbered(moving_mean(report.reward, window=_WINDOW))
    hurt = [float(fault.step + 1) for fault in report.faults]
    return charts.curve(_present(series), label="reward per step", faults=hurt)


def moving_mean(values: Sequence[float], *, window: int) -> list[float]:
    """Return for each value the mean of the last ``window`` values, of fewer at the beginning."""
    return [
        statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)
    ]


def _numbered(values: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(at), value) for at, value in enumerate(values, start=1)]


def _heldout(report: DemoReport) -> str:
    series = _present(
        {
            "greedy": [(float(point.step), point.greedy) for point in report.heldout],
            "heldout": [(float(point.step), point.exact_match) for point in report.heldout],
        }
    )
    return charts.curve(series, label="held-out exact match")


def _present(
    series: Mapping[str, list[tuple[float, float]]],
) -> dict[str, list[tuple[float, float]]]:
    return {name: points for name, points in series.items() if points}


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key} · ")
        else:
            rows.append((f"{prefix}{key}".replace("_", " "), _plain(value)))
    return rows


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_plain(item) for item in value) or "none"
    return str(value)
