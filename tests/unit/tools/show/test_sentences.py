"""Every kind of event has a sentence that stands alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.elastic.events import (
    KINDS,
    CheckpointDone,
    Detected,
    Event,
    GenerationProposed,
    JobEnded,
    JobStarted,
    NodeExited,
    StepDone,
    StepProtected,
    StragglerOver,
    UserEvent,
    WorkerStarted,
)
from holdfast.tools.show.sentences import sentence


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            JobStarted(run="ab", nodes=("n0", "n1"), wanted={"trainer": 4, "rollout": 2}),
            "job ab starts on n0, n1: 4 trainer, 2 rollout",
        ),
        (JobEnded(ok=False, message="no node is left"), "the job is over: no node is left"),
        (JobEnded(ok=True), "the job is complete"),
        (
            NodeExited(victim="n1", status="killed by SIGKILL", memory_kept=True),
            "node n1: killed by SIGKILL; its snapshots are kept",
        ),
        (
            WorkerStarted(seat="trainer/0", pid=7, attempt=2),
            "trainer/0 starts, process 7, start 2",
        ),
        (Detected(what="node_lost", victim="n1"), "n1 was lost"),
        (GenerationProposed(generation=2, reason="generation 2: all"), "generation 2: all"),
        (GenerationProposed(generation=2), "generation 2 is proposed"),
        (
            CheckpointDone(step=9, seconds=2.0, bytes=3 << 20, bytes_per_s=1),
            "checkpoint of step 9 is durable: 3.0 MiB in 2.00 s",
        ),
        (StragglerOver(victim="trainer/1"), "trainer/1 keeps up with the others again"),
        (
            StepProtected(generation=1, step=5, seconds=0.25),
            "protected: generation 1, step 5, seconds 0.25",
        ),
        (UserEvent(name="evaluated", fields={"score": 0.5, "note": ""}), "evaluated: score 0.5"),
        (UserEvent(name="bare"), "bare"),
        (UserEvent(name="long", fields={"text": "a\nb " * 200}), f"long: text {'a b ' * 50}…"),
    ],
)
def test_an_event_in_words(event: Event, said: str) -> None:
    assert sentence(event) == said


@given(st.text(max_size=30), st.integers(), st.floats(allow_nan=False))
def test_any_values_are_one_line(text: str, step: int, seconds: float) -> None:
    for event in (
        UserEvent(name="own", fields={"text": text, "n": step, "x": seconds}),
        StepDone(step=step, seconds=seconds, seat=text),
    ):
        assert "\n" not in sentence(event)
    assert "step" in KINDS
