"""The time that a run of a check may take, from what the undisturbed runs took here. Pure.

A machine may be busy with other work, and a model large. So time that is up says nothing about the
script: such a run is not finished, and never a finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.tools.check.trials import Trial

LEAST_RUN_S: Final = 180.0
LEAST_SILENCE_S: Final = 60.0

_PATIENCE: Final = 5.0
"""Times of an undisturbed run that each start of processes may take."""

_SILENT: Final = (
    "no progress for ",
    "did not leave within ",
    "still running ",
    "stopped for ",
    "wait for each other",
)
"""Parts of messages about a job that was ended because a time was up."""

_PROVED: Final = "on all ranks alike, or on none"
"""Part of the message about ranks that were seen to wait in different collectives: no time is up
there, they would wait for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    """The limits of one start of a run, and of a rank's silence in it, in seconds."""

    run_s: float
    silence_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UndisturbedRun:
    """A run without a death: the number of its ranks, and the seconds it took."""

    ranks: int
    seconds: float


def limits_for(
    trial: Trial,
    undisturbed: Sequence[UndisturbedRun],
    *,
    run_s: float | None = None,
    silence_s: float | None = None,
) -> TrialLimits:
    """Return the limits of a run: ``run_s`` and ``silence_s`` where they are given.

    Otherwise they follow from the longest of the ``undisturbed`` runs; more ranks than it had count
    as so much more work. A rank that dies is started again, as in a run of its own.
    """
    took_s = max(
        (run.seconds * max(1.0, trial.ranks / run.ranks) for run in undisturbed), default=0
    )
    starts = 1 + len(trial.deaths)
    return TrialLimits(
        run_s=run_s or max(LEAST_RUN_S, _PATIENCE * starts * took_s),
        silence_s=silence_s or max(LEAST_SILENCE_S, took_s),
    )


def is_of_time(message: str) -> bool:
    """Return whether a job with this ``message`` was ended only because a time was up."""
    return _PROVED not in message and any(part in message for part in _SILENT)


def more_time(trial: Trial, limits: TrialLimits, *, ended: str) -> str:
    """Return the remedy for a run of which ``ended`` says why it was given up."""
    only = f" --only {trial.name}" if trial.name else ""
    if is_of_time(ended):
        option = f"--hang-s {2 * limits.silence_s:.0f}"
    else:
        option = f"--limit-s {2 * limits.run_s:.0f}"
    text = f"this says nothing about the script: run it again with {option}{only}"
    return text if trial.name else f"{text}, or with other --ranks if its mesh needs them"
