"""Figures of a run as short texts for a terminal. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from holdfast.tools.live.view import RecoveryView, RunMessage, RunView
from holdfast.tools.printing import printable

NONE: Final = "–"

PHASES: Final = (
    ("detect", "detect_s"),
    ("agree", "agree_s"),
    ("reform", "reform_s"),
    ("restore", "restore_s"),
    ("repeat", "reexecute_s"),
)
"""The phases of a recovery, and the fields that have them."""


def span(seconds: float | None) -> str:
    """Return a duration in the unit that fits it: ``12 ms``, ``3.4 s``, ``2 min``, ``5.1 h``."""
    if seconds is None:
        return NONE
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def number(value: int | None) -> str:
    """Return a whole number with separators."""
    return NONE if value is None else f"{value:,}"


def share(value: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * value:.1f} %"


def clock(at_s: float) -> str:
    """Return the local time of day."""
    return f"{datetime.fromtimestamp(at_s):%H:%M:%S}"


def trainers(view: RunView) -> str:
    """Return the number of trainers, and how many are wanted."""
    wanted = view.wanted.get("trainer", 0)
    noun = "trainer" if max(view.world, wanted) == 1 else "trainers"
    return f"{view.world} of {wanted} {noun}" if wanted else f"{view.world} {noun}"


def step_of(view: RunView) -> str:
    """Return the completed steps; a coordinator alone does not know them."""
    return number(view.step) if view.timed or view.step else "not known"


def headline(view: RunView) -> str:
    """Return the state of a run in one line."""
    parts = [f"step {step_of(view)}", f"generation {view.generation}", trainers(view)]
    if view.timed:
        parts.append(f"{span(view.step_s)} a step")
        parts.append(f"goodput {share(view.goodput)}")
        parts.append(f"{span(view.wall_s)} in all")
    return f"{view.state}: {', '.join(parts)}"


def protection(view: RunView) -> str:
    """Return the newest protected step and the cost of a loss now in one line."""
    found = view.protection
    if found.step is None:
        return "no step is protected"
    if view.ended_s is not None:
        return f"step {number(found.step)} was protected"
    risk = f"a loss now costs {number(found.at_risk_steps)} steps, {span(found.at_risk_s)}"
    return f"step {number(found.step)} is protected, {span(found.age_s)} old; {risk}"


def change(found: RecoveryView) -> str:
    """Return a change of the ranks in one line: cause, cost, and the planner's reason."""
    who = f" of {', '.join(found.victims)}" if found.victims else ""
    parts = [f"generation {found.generation} after {found.cause}{who}"]
    if found.total_s is not None:
        parts.append(f"{span(found.total_s)} in all, {found.steps_lost} steps repeated")
    elif not found.over:
        parts.append("not over yet")
    reason = f" ({found.reason})" if found.reason else ""
    return printable(f"{', '.join(parts)}{reason}")


def message(told: RunMessage) -> str:
    """Return a message with its reason in one line, made printable."""
    reason = f" ({told.reason})" if told.reason else ""
    return printable(f"{clock(told.at_s)} {told.node}: {told.text}{reason}")
