"""The check of runs that train one policy each finds steps on other samples than the lead's."""

from __future__ import annotations

import pytest

from holdfast.tools.chaos.judging.casts import SAMPLES_OF_THE_LEAD, check_cast
from holdfast.tools.chaos.judging.record import Consumed, History, StepCommit


def history(*steps: tuple[int, int, str]) -> History:
    """Return a history of steps: number, attempt, and the name of the sample of rank 0."""
    return History(
        commits=tuple(
            StepCommit(t=float(at), step=step, rank=rank, attempt=attempt)
            for at, (step, attempt, _) in enumerate(steps)
            for rank in range(2)
        ),
        consumed=tuple(
            Consumed(t=float(at), step=step, rank=rank, attempt=attempt, epoch=0, ids=(name,))
            for at, (step, attempt, sample) in enumerate(steps)
            for rank, name in enumerate((sample, f"batch of {sample}"))
        ),
    )


LEAD = history((1, 1, "a"), (2, 1, "b"), (3, 1, "c"))


def test_runs_on_the_same_samples_hold_also_after_a_return() -> None:
    other = history((1, 1, "a"), (2, 1, "wrong"), (2, 2, "b"), (3, 2, "c"))
    found = check_cast({"solver": LEAD, "critic": other}, lead="solver")
    assert found.held and found.checked == (SAMPLES_OF_THE_LEAD,)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (history((1, 1, "a"), (2, 1, "a"), (3, 1, "c")), "step 2 has 1 others and lacks 1"),
        (history((1, 1, "a"), (2, 1, "b")), "step 3 has 0 others and lacks 1"),
        (
            history((1, 1, "a"), (2, 1, "b"), (3, 1, "c"), (4, 1, "d")),
            "step 4 has 1 others and lacks 0",
        ),
    ],
)
def test_a_run_on_other_samples_is_named(other: History, says: str) -> None:
    (found,) = check_cast({"critic": other, "solver": LEAD}, lead="solver").violations
    assert found.message.startswith("critic: 1 steps trained on other samples than solver")
    assert says in found.message


def test_what_nobody_told_is_not_checked() -> None:
    silent = History(commits=LEAD.commits)
    assert check_cast({"solver": LEAD, "critic": silent}, lead="solver").checked == ()
    assert check_cast({"critic": LEAD}, lead="solver").checked == ()
