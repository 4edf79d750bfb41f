"""The timeline built from events: recoveries by phase, goodput, lanes."""

import pytest
from synthetic_run import Story, hurt_job

from holdfast.elastic.events import Detected, JobEnded, JobStarted
from holdfast.tools.report import timeline
from holdfast.tools.report.accounting import CLASSES, Interval, account
from holdfast.tools.report.record import recovery_rows, summarise


def test_a_trainer_kill_is_split_into_its_phases() -> None:
    recovery = timeline.build(hurt_job()).recoveries[0]
    assert (recovery.kind, recovery.victim, recovery.generation) == ("kill_trainer", "trainer/1", 2)
    assert recovery.detect_s == pytest.approx(0.01, abs=1e-3)
    assert recovery.agree_s == pytest.approx(0.05, abs=1e-3)
    assert recovery.reform_s == pytest.approx(0.05, abs=1e-3)
    assert recovery.restore_s == pytest.approx(0.06, abs=1e-3)
    assert recovery.reexecute_s == 0.0
    assert recovery.steps_lost == 0
    assert recovery.restore_step == 5


def test_phases_add_up_to_the_total() -> None:
    for row in recovery_rows(timeline.build(hurt_job())):
        if row.generation is not None:
            parts = sum(getattr(row, phase) for phase in timeline.PHASES)
            assert row.total_s == pytest.approx(parts)


def test_a_rollout_kill_needs_no_new_generation() -> None:
    recovery = timeline.build(hurt_job()).recoveries[1]
    assert recovery.generation is None
    assert recovery.reform_s is None
    assert recovery.detect_s == pytest.approx(0.004, abs=1e-3)
    assert recovery.total_s == pytest.approx(0.06, abs=1e-3)
    assert "5 unfinished samples" in recovery.note


def test_a_lost_step_is_counted_and_its_first_execution_does_not_stand() -> None:
    story = timeline.build(hurt_job())
    recovery = story.recoveries[2]
    assert recovery.steps_lost == 1
    assert recovery.reexecute_s == pytest.approx(1.34, abs=1e-2)
    fates = {run.generation: run.stands for run in story.steps if run.step == 12}
    assert fates == {3: False, 4: True}


def test_every_second_is_in_exactly_one_class() -> None:
    story = timeline.build(hurt_job())
    assert sum(story.shares.values()) == pytest.approx(story.wall_s)
    assert set(story.shares) == set(CLASSES)
    assert story.goodput == pytest.approx(story.shares["productive"] / story.wall_s)
    assert 0.6 < story.goodput < 0.8


def test_lives_end_where_they_were_killed() -> None:
    lives = timeline.build(hurt_job()).lives
    endings = {(life.seat, life.attempt): life.ending for life in lives}
    assert endings == {
        ("trainer/0", 1): "killed",
        ("trainer/0", 2): "running",
        ("trainer/1", 1): "killed",
        ("trainer/1", 2): "running",
        ("rollout/0", 1): "killed",
        ("rollout/0", 2): "running",
        ("rollout/1", 1): "killed",
    }
    killed_with_node = next(life for life in lives if life.seat == "rollout/1")
    assert killed_with_node.end_s == pytest.approx(17.0)


def test_a_second_failure_on_the_way_counts_until_a_generation_works() -> None:
    story = Story()
    story.at(0.0, JobStarted)
    both = {"trainer/0": "a", "trainer/1": "b"}
    story.generation(1, t=1.0, restore=0, seats=both, reason="start")
    story.steps(range(1, 3), start=1.2, seconds=1.0, generation=1, seats=both)
    story.kill(3.5, "kill_trainer", "trainer/1", on="b", seats=["trainer/1"])
    story.at(3.6, Detected, what="exit", victim="trainer/1", node="b")
    alone = {"trainer/0": "a"}
    story.generation(2, t=3.7, restore=2, seats=alone, reason="smaller")
    story.generation(3, t=4.0, restore=2, seats=alone, reason="again: the first attempt was fenced")
    story.steps(range(3, 4), start=4.2, seconds=1.0, generation=3, seats=alone)
    story.at(5.5, JobEnded, ok=True)
    recovery = timeline.build(story.events).recoveries[0]
    assert recovery.generation == 3
    assert recovery.total_s == pytest.approx(4.11 - 3.5, abs=1e-3)


def test_a_fault_without_an_answer_has_no_total() -> None:
    story = Story()
    story.at(0.0, JobStarted)
    story.kill(1.0, "kill_trainer", "trainer/0", on="a", seats=["trainer/0"])
    story.at(2.0, JobEnded, ok=False)
    result = timeline.build(story.events)
    assert result.recoveries[0].total_s is None
    assert not result.ok


def test_no_events_is_an_error() -> None:
    with pytest.raises(ValueError, match="no events"):
        timeline.build([])


def test_overlapping_claims_go_to_the_first_class() -> None:
    shares = account(
        10.0,
        [
            Interval("productive", 1.0, 6.0),
            Interval("recovery", 4.0, 5.0),
            Interval("startup", -3.0, 1.0),
            Interval("shutdown", 9.0, 99.0),
        ],
    )
    assert shares["productive"] == pytest.approx(4.0)
    assert shares["recovery"] == pytest.approx(1.0)
    assert shares["startup"] == pytest.approx(1.0)
    assert shares["shutdown"] == pytest.approx(1.0)
    assert shares["between steps"] == pytest.approx(3.0)


def test_an_unknown_class_of_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="lunch"):
        account(1.0, [Interval("lunch", 0.0, 1.0)])


def test_the_summary_leaves_out_faults_that_touched_no_trainer() -> None:
    summary = summarise(recovery_rows(timeline.build(hurt_job())))
    assert summary["total_s"]["max"] == pytest.approx(2.45, abs=1e-2)
    assert summary["total_s"]["mean"] == pytest.approx((2.45 + 0.17) / 2, abs=1e-2)
