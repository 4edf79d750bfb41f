"""The spans of a job, folded from its events: recoveries, joins, checkpoints, across machines."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from synthetic_run import BEGIN, Story, hurt_job

from holdfast.elastic.events import (
    CheckpointCarried,
    CheckpointDone,
    CheckpointFailed,
    CheckpointProgress,
    CheckpointRetried,
    CheckpointSkipped,
    CheckpointStarted,
    Detected,
    Event,
    FencingBegun,
    FencingDone,
    GenerationProposed,
    JobEnded,
    JobStarted,
    RankReformed,
    StatePrefetched,
    StateRestored,
    StepDone,
    TrainingResumed,
    WorkerRehearsed,
    WorkerStarted,
)
from holdfast.tools.traces.fold import Traces
from holdfast.tools.traces.spans import ROOT, TraceSpan, span_number, trace_number


def spans_of(events: Iterable[Event]) -> list[TraceSpan]:
    return list(Traces().add(sorted(events, key=lambda event: event.time_s)))


def trace(spans: Iterable[TraceSpan], name: str) -> list[TraceSpan]:
    found = [span for span in spans if span.trace == name]
    return sorted(found, key=lambda span: (span.parent != "", span.start_s, span.key))


def seconds(span: TraceSpan) -> tuple[float, float]:
    """Return start and length, in seconds since the job started."""
    return round(span.start_s - BEGIN, 3), round(span.end_s - span.start_s, 3)


def recovered() -> list[Event]:
    """Node b loses its trainer at 10 s; node a goes on alone."""
    story = Story()
    story.at(0.0, JobStarted, run="r-1", node="launcher", source="launcher")
    for seat, node, pid in (("trainer/0", "a", 7), ("trainer/1", "b", 8)):
        story.at(0.1, WorkerStarted, seat=seat, node=node, pid=pid, source="agent")
    story.generation(1, t=3.0, restore=0, seats={"trainer/0": "a", "trainer/1": "b"}, reason="new")
    story.steps(
        range(1, 6),
        start=3.3,
        seconds=0.9,
        generation=1,
        seats={"trainer/0": "a", "trainer/1": "b"},
    )
    story.at(10.0, Detected, what="exit", victim="trainer/1", why="killed by SIGKILL", node="b")
    for node, t in (("a", 10.01), ("b", 10.02)):
        story.at(t, FencingBegun, node=node, source="agent", generation=1, reason="it died")
        story.at(t + 0.1, FencingDone, node=node, source="agent", generation=1)
    proposed = {"generation": 2, "ranks": ("trainer/0",), "restore_step": 4}
    story.at(10.2, GenerationProposed, node="a", source="agent", restore_how="memory", **proposed)
    who = {"generation": 2, "rank": 0, "seat": "trainer/0", "node": "a", "source": "worker"}
    story.at(10.3, RankReformed, world=1, **who)
    story.at(10.6, StateRestored, step=4, tier="peer", seconds=0.2, **who)
    story.at(11.5, StepDone, step=5, start_s=BEGIN + 10.7, seconds=0.8, **who)
    story.at(11.5, TrainingResumed, generation=2, step=5, seat="trainer/0", node="a")
    return story.events


def test_a_recovery_is_a_trace_from_its_detection_to_the_next_complete_step() -> None:
    root, *parts = trace(spans_of(recovered()), "generation 2")
    assert (root.key, root.parent, root.name) == (ROOT, "", "recovery")
    assert seconds(root) == (10.0, 1.5)
    assert root.about["holdfast.cause"] == "loss"
    assert root.about["holdfast.restore_step"] == 4
    assert root.about["holdfast.steps_lost"] == 1
    assert [(mark.name, mark.about["holdfast.victim"]) for mark in root.marks] == [
        ("exit", "trainer/1")
    ]
    assert [(part.name, part.teller.node, *seconds(part)) for part in parts] == [
        ("agree", "a", 10.0, 0.2),
        ("fence", "a", 10.01, 0.1),
        ("fence", "b", 10.02, 0.1),
        ("reform", "a", 10.2, 0.1),
        ("restore", "a", 10.4, 0.2),
        ("first step", "a", 10.7, 0.8),
    ]
    assert all(part.parent == ROOT and not part.error for part in parts)


def test_a_span_names_node_role_and_process() -> None:
    parts = trace(spans_of(recovered()), "generation 2")
    restore = next(part for part in parts if part.name == "restore")
    teller = restore.teller
    assert (teller.node, teller.role, teller.seat, teller.pid) == ("a", "trainer", "trainer/0", 7)
    fence = next(part for part in parts if part.key == "fence b")
    assert (fence.teller.role, fence.teller.pid) == ("agent", 0)


def test_the_first_generation_is_the_start_of_training() -> None:
    root = trace(spans_of(recovered()), "generation 1")[0]
    assert (root.name, *seconds(root)) == ("start of training", 0.0, 4.2)


def test_an_injected_fault_begins_the_trace_before_it_is_noticed() -> None:
    spans = spans_of(hurt_job())
    root, detect, agree = trace(spans, "generation 2")[:3]
    assert seconds(root)[0] == 8.3
    assert (detect.name, *seconds(detect)) == ("detect", 8.3, 0.01)
    assert (agree.name, *seconds(agree)) == ("agree", 8.31, 0.05)


def test_a_join_changes_the_ranks_and_is_a_trace_of_its_own() -> None:
    story = Story()
    story.events = recovered()
    story.at(12.0, WorkerStarted, seat="trainer/1", node="b", pid=9, source="agent", attempt=2)
    who = {"seat": "trainer/1", "node": "b", "source": "worker"}
    story.at(14.0, WorkerRehearsed, rank=1, world=2, error="", over=False, seconds=0.5, **who)
    fetched = {"wanted_bytes": 9, "held_bytes": 9, "fetched_bytes": 9}
    story.at(14.4, StatePrefetched, generation=2, step=5, seconds=0.3, **fetched, **who)
    story.at(14.5, Detected, what="join", victim="trainer/1", node="b")
    both = {"trainer/0": "a", "trainer/1": "b"}
    story.generation(3, t=15.0, restore=5, seats=both, reason="it joins")
    story.steps(range(6, 8), start=15.2, seconds=0.9, generation=3, seats=both)
    spans = spans_of(story.events)
    change = trace(spans, "generation 3")[0]
    assert (change.name, seconds(change)[0]) == ("change for a join", 14.5)
    root, *parts = trace(spans, "join trainer/1 b 9")
    assert (root.name, *seconds(root)) == ("join", 12.0, 4.1)
    assert root.links == ("generation 3",)
    assert root.about["holdfast.attempt"] == 2
    assert [part.name for part in parts] == [
        "start",
        "rehearse",
        "wait for its turn",
        "prefetch",
        "enter the generation",
        "restore",
        "first step",
    ]


def test_the_first_trainers_join_nobody() -> None:
    assert not [span for span in spans_of(recovered()) if span.name == "join"]


def test_a_generation_that_is_overtaken_says_so_and_the_next_begins_at_the_loss() -> None:
    story = Story()
    story.events = [
        event
        for event in recovered()
        if not (isinstance(event, StepDone | TrainingResumed) and event.generation == 2)
    ]
    story.at(12.0, Detected, what="node_lost", victim="b", node="a")
    story.generation(3, t=12.5, restore=4, seats={"trainer/0": "a"}, reason="again")
    story.steps(range(5, 6), start=12.7, seconds=0.3, generation=3, seats={"trainer/0": "a"})
    spans = spans_of(story.events)
    assert trace(spans, "generation 2")[0].error == "overtaken by generation 3"
    root = trace(spans, "generation 3")[0]
    assert (root.error, *seconds(root)) == ("", 10.0, 3.0)


def test_a_loss_after_an_unanswered_join_begins_with_the_loss() -> None:
    story = Story()
    story.at(4.0, Detected, what="join", victim="trainer/9", node="b")
    root = trace(spans_of([*recovered(), *story.events]), "generation 2")[0]
    assert (root.about["holdfast.cause"], seconds(root)[0]) == ("loss", 10.0)


def test_a_sidecar_that_ended_long_ago_is_no_cause() -> None:
    story = Story()
    story.at(5.0, Detected, what="sidecar_exit", victim="a/sidecar", node="a")
    late = [event if event.time_s < BEGIN + 10 else _later(event, by=100) for event in recovered()]
    root = trace(spans_of([*late, *story.events]), "generation 2")[0]
    assert seconds(root)[0] == 110.0


def _later(event: Event, *, by: float) -> Event:
    return msgspec.structs.replace(event, time_s=event.time_s + by)


def test_the_end_of_the_job_ends_what_was_open_with_an_error() -> None:
    story = Story()
    story.at(0.0, JobStarted, run="r-1")
    story.at(1.0, GenerationProposed, generation=1, ranks=("trainer/0",), node="a")
    story.at(2.0, CheckpointStarted, step=7, bytes=9, node="a")
    story.at(3.0, JobEnded, ok=False)
    spans = {(span.trace, span.key): span.error for span in spans_of(story.events)}
    assert spans[("generation 1", ROOT)] == "the job ended before it completed a step"
    assert spans[("checkpoint 7", ROOT)] == "the job ended before it was durable"


def test_machines_that_read_their_own_files_tell_the_same_spans_together() -> None:
    """The files of node a and of node b, read apart, give the trace of both, no span twice."""
    events = recovered()
    both = spans_of(events)
    apart = [
        span
        for node in ("a", "b")
        for span in spans_of(each for each in events if each.node in (node, "launcher"))
    ]
    numbers = [span_number(span.run, span.trace, span.key) for span in apart]
    assert len(numbers) == len(set(numbers))
    assert {trace_number(span.run, span.trace) for span in apart if "2" in span.trace} == {
        trace_number("r-1", "generation 2")
    }
    local = {"restore", "first step", "agree"}
    names = {(span.trace, span.key) for span in apart}
    second = trace(both, "generation 2")
    assert {(span.trace, span.key) for span in second if span.name in local} <= names


def test_a_reader_that_starts_again_tells_the_same_numbers() -> None:
    first, second = (
        {(trace_number(s.run, s.trace), span_number(s.run, s.trace, s.key)) for s in found}
        for found in (spans_of(hurt_job()), spans_of(hurt_job()))
    )
    assert first == second
    assert len(first) == len(spans_of(hurt_job()))


def test_another_run_has_other_numbers() -> None:
    assert trace_number("a", "generation 2") != trace_number("b", "generation 2")
    assert 0 < trace_number("a", "x") < 1 << 128
    assert 0 < span_number("a", "x", ROOT) < 1 << 64


def test_a_rollout_worker_that_is_recovered_is_a_trace() -> None:
    (root,) = [s for s in spans_of(hurt_job()) if s.name == "recovery of a rollout worker"]
    assert seconds(root) == (13.004, 0.056)
    assert root.about["holdfast.unfinished"] == 5


def told(*events: tuple[float, type[Event], dict[str, object]]) -> list[TraceSpan]:
    story = Story()
    story.at(0.0, JobStarted, run="r-1")
    for t, kind, fields in events:
        story.at(t, kind, node="a", seat="trainer/0", source="worker", **fields)
    return spans_of(story.events)


def test_a_checkpoint_is_a_trace_with_a_span_for_each_attempt() -> None:
    root, first, second = told(
        (1.0, CheckpointStarted, {"step": 20, "bytes": 100}),
        (2.0, CheckpointProgress, {"step": 20, "bytes": 50, "total_bytes": 100}),
        (3.0, CheckpointRetried, {"step": 20, "attempt": 1, "error": "the disk is full"}),
        (5.0, CheckpointDone, {"step": 20, "seconds": 4.0, "bytes": 100, "bytes_per_s": 25}),
    )[::-1]
    assert (root.name, *seconds(root)) == ("checkpoint", 1.0, 4.0)
    assert root.about["holdfast.result"] == "done"
    assert [mark.name for mark in root.marks] == ["checkpoint_progress"]
    assert (first.key, first.error) == ("write 2", "")
    assert (second.key, second.error, *seconds(second)) == ("write 1", "the disk is full", 1.0, 2.0)


def test_a_checkpoint_of_which_only_the_end_is_read_begins_where_it_did() -> None:
    spans = told((5.0, CheckpointDone, {"step": 2, "seconds": 4, "bytes": 1, "bytes_per_s": 1}))
    assert [seconds(span) for span in spans] == [(1.0, 4.0), (1.0, 4.0)]


def test_a_checkpoint_that_fails_is_an_error() -> None:
    failed = {"step": 2, "error": "full", "in_a_row": 1, "fatal": False, "newest": -1}
    write, root = told(
        (1.0, CheckpointStarted, {"step": 2, "bytes": 1}),
        (2.0, CheckpointCarried, {"step": 2, "rebuilt": (1,)}),
        (3.0, CheckpointFailed, failed),
    )
    assert (write.error, root.error) == ("full", "full")


def test_a_checkpoint_that_is_left_out_is_a_moment() -> None:
    (root,) = told((1.0, CheckpointSkipped, {"step": 2, "reason": "the last one is written"}))
    assert (*seconds(root), root.error) == (1.0, 0.0, "")


def test_checkpoints_that_never_end_are_bounded() -> None:
    traces = Traces()
    started = [CheckpointStarted(step=step, bytes=1, time_s=step) for step in range(1000)]
    assert not list(traces.add(started))
    assert len([span for span in traces.close() if span.key == ROOT]) == 16
