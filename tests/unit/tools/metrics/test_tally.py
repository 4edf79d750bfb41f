"""The counts of a job's events: exact, and of few series."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from synthetic_run import Story, hurt_job

from holdfast.elastic.events import (
    CheckpointDone,
    CheckpointFailed,
    Detected,
    Event,
    GenerationProposed,
    JobEnded,
    JobStarted,
    SnapshotsLeftOut,
    StateRestored,
    StepDone,
    StragglerFound,
    StragglerOver,
    TokensSampled,
    WorkerStarted,
)
from holdfast.tools.metrics.families import FAMILIES, BucketCounts
from holdfast.tools.metrics.tally import EventTally

Key = tuple[str, ...]


def counted(events: Iterable[Event]) -> dict[Key, float | BucketCounts]:
    """Return values by name without prefix and labels."""
    tally = EventTally()
    tally.add(sorted(events, key=lambda event: event.time_s))
    return {(s.name.removeprefix("holdfast_"), *s.labels): s.value for s in tally.samples()}


def told(*events: tuple[type[Event], dict[str, object]]) -> dict[Key, float | BucketCounts]:
    story = Story()
    for t, (kind, fields) in enumerate(events):
        story.at(float(t), kind, **fields)
    return counted(story.events)


def test_a_job_that_is_hurt_is_counted_exactly() -> None:
    found = counted(hurt_job())
    assert found["step",] == 18
    assert found["job_running",] == 0
    assert found["job_failed",] == 0
    assert found["generations_total",] == 5
    assert found["steps_executed_total",] == 19
    assert found["steps_repeated_total",] == 1
    assert found["faults_injected_total",] == 3
    assert found["detections_total", "b", "exit"] == 1
    assert found["detections_total", "c", "exit"] == 1
    assert found["detections_total", "a", "node_lost"] == 1
    assert found["workers_started_total", "c", "rollout"] == 2
    recoveries = found["recovery_duration_seconds", "loss"]
    assert isinstance(recoveries, BucketCounts)
    assert sum(recoveries.counts) == 2
    assert recoveries.total == pytest.approx(1.5 + 2.45)


def test_every_sample_is_of_a_known_family_with_its_labels() -> None:
    tally = EventTally()
    tally.add(hurt_job())
    for name, labels, value in tally.samples():
        assert len(labels) == len(FAMILIES[name].labels), name
        assert isinstance(value, BucketCounts) == (FAMILIES[name].kind == "histogram"), name


def test_series_that_count_begin_at_nothing() -> None:
    found = told((JobStarted, {"run": "r", "nodes": ("n0",), "wanted": {"trainer": 4}}))
    assert found["checkpoints_total", "failed"] == 0
    assert found["detections_total", "n0", "exit"] == 0
    assert found["ranks_wanted",] == 4
    assert found["job_running",] == 1


def test_the_number_of_series_does_not_grow_with_the_steps() -> None:
    short, long = Story(), Story()
    for story, steps in ((short, 3), (long, 3000)):
        story.steps(range(1, steps), start=0.0, seconds=0.1, generation=1, seats={"trainer/0": "a"})
    assert len(counted(short.events)) == len(counted(long.events))


def test_steps_that_are_not_protected_are_the_difference() -> None:
    step = {"generation": 1, "seat": "trainer/0", "node": "a", "unprotected_s": 2.5}
    found = told((StepDone, {"step": 9, "protected": 6, **step}))
    assert found["unprotected_steps",] == 3
    assert found["unprotected_seconds", "a"] == 2.5


def test_a_step_that_another_rank_has_completed_before_is_not_repeated() -> None:
    steps = [
        (StepDone, {"step": step, "rank": rank, "node": "a", "seat": f"trainer/{rank}"})
        for step in (1, 2)
        for rank in (1, 0)
    ]
    assert told(*steps)["steps_repeated_total",] == 0


def test_unknown_words_are_one_series() -> None:
    found = told(
        (Detected, {"what": "eaten by mice", "victim": "a", "node": "b"}),
        (Detected, {"what": "flooded", "victim": "a", "node": "b"}),
        (StateRestored, {"generation": 1, "tier": "a cupboard"}),
    )
    assert found["detections_total", "a", "other"] == 2
    assert found["restores_total", "other"] == 1


@pytest.mark.parametrize(
    ("victim", "node"),
    [("trainer/0", "a"), ("trainer/9", "teller"), ("c", "c"), ("d/sidecar", "d")],
)
def test_a_loss_counts_for_the_node_of_its_victim(victim: str, node: str) -> None:
    found = told(
        (WorkerStarted, {"seat": "trainer/0", "node": "a", "pid": 1}),
        (Detected, {"what": "exit", "victim": victim, "node": "teller"}),
    )
    assert found["detections_total", node, "exit"] == 1


def test_checkpoints_are_counted_by_result() -> None:
    done = {"seconds": 2.0, "bytes": 100, "bytes_per_s": 50}
    failed = {"step": 3, "error": "full", "in_a_row": 1, "fatal": False, "newest": 2}
    found = told(
        (CheckpointDone, {"step": 1, **done}),
        (CheckpointDone, {"step": 2, **done}),
        (CheckpointFailed, failed),
    )
    assert found["checkpoints_total", "done"] == 2
    assert found["checkpoints_total", "failed"] == 1
    assert found["checkpoint_seconds_total",] == 4
    assert found["checkpoint_step",] == 2


def test_stragglers_are_those_that_hold_up_now() -> None:
    about = dict.fromkeys(("times", "microbatch_s", "others_s", "waits", "data", "busy"), 1.0)
    found = {"on": "a", "why": "slow", "computes": True, **about}
    held = [(StragglerFound, {"victim": f"trainer/{i}", **found}) for i in (0, 1)]
    assert told(*held)["stragglers", "a"] == 2
    assert told(*held, (StragglerOver, {"victim": "trainer/1"}))["stragglers", "a"] == 1


def test_snapshots_that_are_left_out_are_those_of_this_generation() -> None:
    left = {"generation": 1, "step": 5, "count": 4, "newest": 1, "reason": "no room", "node": "a"}
    assert told((SnapshotsLeftOut, left))["snapshots_left_out", "a"] == 4
    again = (GenerationProposed, {"generation": 2})
    assert told((SnapshotsLeftOut, left), again)["snapshots_left_out", "a"] == 0


def test_tokens_add_up_over_the_starts_of_a_worker() -> None:
    worker = {"node": "a", "seat": "rollout/0"}
    sampled = [
        (TokensSampled, {"tokens": tokens, "sampling_s": 1, "logging_s": 1, **worker})
        for tokens in (100, 250)
    ]
    started = (WorkerStarted, {"pid": 1, **worker})
    found = told(started, *sampled, started, *sampled)
    assert found["sampled_tokens_total", "a"] == 500


def test_a_job_that_failed_says_so() -> None:
    assert told((JobEnded, {"ok": False}))["job_failed",] == 1
