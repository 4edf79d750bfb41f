"""The verdict on a job in which each policy has a run of its own, from the folders of a run."""

from __future__ import annotations

from pathlib import Path

from holdfast.tools.chaos.judging.casts import check_cast
from holdfast.tools.chaos.judging.checker import HistoryVerdict
from holdfast.tools.chaos.judging.seas import together
from holdfast.tools.chaos.real.islands.story import histories_of, verdicts_on
from holdfast.tools.chaos.scenarios.scenario import Checks


def judge(
    history: Path, *, lead: str, calm: Path | None, checks: Checks
) -> tuple[HistoryVerdict, list[str]]:
    """Return the verdict on the runs of all policies, and what cannot be read.

    ``lead`` is the policy whose run samples; ``calm`` is the history of the undisturbed job.
    """
    histories, problems = histories_of(history)
    same = calm if checks.state == "bitwise" else None
    verdicts = verdicts_on(histories, calm=same, checks=checks)
    return together(verdicts, check_cast(histories, lead=lead)), problems
