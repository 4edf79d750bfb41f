"""The time that a run of a check may take follows from the machine, and is never a finding."""

from __future__ import annotations

import pytest

from holdfast.tools.check.limits import (
    LEAST_RUN_S,
    LEAST_SILENCE_S,
    TrialLimits,
    UndisturbedRun,
    is_of_time,
    limits_for,
    more_time,
)
from holdfast.tools.check.trials import StageShape, reference, trials

RUNS = {
    trial.name: trial
    for trial in trials(
        ("shares", "kills", "disk"),
        ranks=(1, 2),
        microbatches=4,
        stages=[StageShape(name="train", phases=2, steps=6)],
    )
}


def took(seconds: float, ranks: int = 2) -> list[UndisturbedRun]:
    return [UndisturbedRun(ranks=ranks, seconds=seconds)]


def test_the_first_run_has_the_least() -> None:
    limits = limits_for(reference(1), [])
    assert (limits.run_s, limits.silence_s) == (LEAST_RUN_S, LEAST_SILENCE_S)


def test_each_death_of_a_rank_has_the_time_of_a_run_of_its_own() -> None:
    calm, killed = (limits_for(RUNS[name], took(50.0)).run_s for name in ("shares", "kills"))
    assert killed == (1 + len(RUNS["kills"].deaths)) * calm > LEAST_RUN_S


def test_the_longest_run_counts_and_more_ranks_are_more_work() -> None:
    both = [*took(100.0, ranks=1), *took(150.0)]
    assert limits_for(RUNS["disk"], both) == limits_for(RUNS["disk"], took(200.0))


def test_a_free_machine_shortens_nothing() -> None:
    assert limits_for(RUNS["shares"], took(1.0)) == limits_for(reference(1), [])


def test_a_rank_may_be_silent_as_long_as_a_whole_run() -> None:
    assert limits_for(RUNS["kills"], took(300.0)).silence_s == 300.0


def test_given_limits_are_not_extended() -> None:
    limits = limits_for(RUNS["kills"], took(500.0), run_s=20.0, silence_s=3.0)
    assert (limits.run_s, limits.silence_s) == (20.0, 3.0)


@pytest.mark.parametrize(
    "message",
    [
        "trainer/1 failed 7 times in a row: no progress for 61.0 s in step 3, 60 s are allowed",
        "trainer/0: killed by SIGKILL: did not leave within 20 s",
        "all ranks of generation 2 wait for each other, for the 7. time: trainer/0 in run.steps",
    ],
)
def test_a_job_that_was_ended_because_a_time_was_up_is_known(message: str) -> None:
    assert is_of_time(message)


@pytest.mark.parametrize(
    "message",
    [
        "all ranks of generation 2 wait for each other: trainer/0 in dist.barrier at train.py:3; "
        "trainer/1 in run.steps at train.py:9. Call dist.barrier on all ranks alike, or on none",
        "run.track: best is a number",
        "",
    ],
)
def test_a_refusal_and_ranks_that_were_seen_in_two_collectives_are_no_matter_of_time(
    message: str,
) -> None:
    assert not is_of_time(message)


def test_the_remedy_names_the_option_whose_time_was_up_and_the_property() -> None:
    limits = TrialLimits(run_s=420.0, silence_s=60.0)
    late = more_time(RUNS["kills"], limits, ended="not finished within 420 s")
    silent = more_time(RUNS["kills"], limits, ended="no progress for 60.1 s in step 1")
    assert "--limit-s 840 --only kills" in late
    assert "--hang-s 120 --only kills" in silent
    assert "other --ranks" in more_time(reference(1), limits, ended="not finished within 420 s")
