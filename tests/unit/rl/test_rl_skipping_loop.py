"""A custom loop passes over groups of equal rewards, and a job of such groups alone stops."""

from __future__ import annotations

import msgspec
import pytest
from own_loops import PLAN, Job, finish

from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.library import Mode, Rollouts, Trajectory
from holdfast.elastic.errors import ConfigError, JobFailedError

EQUAL = {0, 3, 4, 5}


def reward_of(sample: Trajectory) -> float:
    return 1.0 if sample.ordinal in EQUAL else float(sample.sample)


def job(*, limit: int = 9, mode: Mode = Mode.FIXED_LAG, eta: int = 0) -> Job:
    scheduling = Scheduling(skip_equal=limit)
    return Job(msgspec.structs.replace(PLAN, scheduling=scheduling, mode=mode, eta=eta, steps=3))


def trained(job: Job, rollouts: Rollouts) -> list[int]:
    return sorted({each.ordinal for each in job.step(rollouts)})


@pytest.mark.parametrize("eta", [0, 1])
@pytest.mark.parametrize("mode", [Mode.FIXED_LAG, Mode.BOUNDED])
def test_steps_are_full_of_groups_that_teach_something(mode: Mode, eta: int) -> None:
    run = job(mode=mode, eta=eta)
    rollouts = run.enter("p", reward_of=reward_of)
    assert [trained(run, rollouts) for _ in range(3)] == [[1, 2], [6, 7], [8, 9]]
    report = rollouts.report()
    assert report["violations"] == []
    assert report["groups_skipped"] == report["ordinals"]["skipped"] == 4
    assert report["ordinals"]["trained"] == 6


def test_another_process_passes_over_the_same_groups() -> None:
    run = job(eta=1)
    first = run.enter("p", reward_of=reward_of)
    assert trained(run, first) == [1, 2]
    for sample, _ in zip(first.samples(), range(3), strict=False):
        finish(sample)  # and it is killed
    second = run.enter("q", reward_of=reward_of)
    assert [trained(run, second) for _ in range(2)] == [[6, 7], [8, 9]]
    assert second.report()["violations"] == []


def test_samples_that_are_collected_first_are_asked_for_again() -> None:
    run = job()
    rollouts = run.enter("p", reward_of=reward_of)
    for sample in list(rollouts.samples()):
        finish(sample)
    with pytest.raises(ConfigError, match=r"finish all that samples\(\) yields when asked again"):
        rollouts.batch()
    for sample in list(rollouts.samples()):
        finish(sample)
    assert {each.ordinal for each in rollouts.batch()} == {1, 2}


def test_a_job_whose_groups_are_all_equal_stops_by_name() -> None:
    run = job(limit=2)
    rollouts = run.enter("p", reward_of=lambda sample: 0.5)
    with pytest.raises(
        JobFailedError, match=r"step 1 passed over 4 groups, which skip_equal=2 allows"
    ):
        run.step(rollouts)


def test_without_rewards_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="give Rollouts reward_of, or set skip_equal to None"):
        job().enter("p")
