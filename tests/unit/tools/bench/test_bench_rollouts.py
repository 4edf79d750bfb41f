"""Measures read from the events of a reinforcement learning job."""

from __future__ import annotations

import pytest

from holdfast.elastic.events import (
    Event,
    MetricsLogged,
    RolloutRecovered,
    RolloutsAwaited,
    StepDone,
    TokensSampled,
)
from holdfast.tools.bench.rollouts import handed_on, logged, pace, sampled


def steps(*ends: float) -> list[Event]:
    events: list[Event] = []
    for step, t in enumerate(ends, 1):
        events.append(RolloutsAwaited(time_s=t - 0.5, step=step, seconds=0.25))
        events.append(StepDone(time_s=t, step=step, rank=0))
        events.append(StepDone(time_s=t + 9, step=step, rank=1))
        events.append(MetricsLogged(time_s=t, step=step, values={"tokens": 100.0 * step}))
    return events


def events_of(seat: str, *totals: tuple[float, int]) -> list[Event]:
    return [
        TokensSampled(
            seat=seat,
            time_s=t,
            tokens=tokens,
            sampling_s=0.9 * t,
            logging_s=0.1 * t,
            logged_bytes=6 * tokens,
        )
        for t, tokens in totals
    ]


def test_the_pace_is_that_behind_the_steps_in_which_the_pipeline_fills() -> None:
    found = pace(steps(10.0, 11.0, 12.0, 14.0), skipped=2)
    assert (found.steps, found.seconds, found.tokens) == (2, 3.0, 700)
    assert found.waited == pytest.approx(0.5 / 3)


def test_too_few_steps_have_no_pace() -> None:
    with pytest.raises(ValueError, match="2 steps were completed"):
        pace(steps(1.0, 2.0), skipped=2)


def test_tokens_between_two_times_are_shared_out_evenly() -> None:
    events = events_of("rollout/0", (0.0, 0), (1.0, 100), (2.0, 300))
    assert sampled(events, since_s=0.5, until_s=1.5) == pytest.approx(50 + 100)
    assert sampled(events, since_s=2.0, until_s=9.0) == 0


def test_a_process_that_begins_anew_takes_nothing_back() -> None:
    events = events_of("rollout/0", (0.0, 0), (1.0, 100)) + events_of(
        "rollout/0", (3.0, 0), (4.0, 50)
    )
    assert sampled(events, since_s=0.0, until_s=9.0) == pytest.approx(150)
    found = logged(events)
    assert (found.tokens, found.nbytes) == (150, 900)
    assert found.share == pytest.approx(0.1)


def test_work_is_handed_on_by_the_first_report_behind_the_loss() -> None:
    events = [
        RolloutRecovered(time_s=t, worker=worker, samples=2, unfinished=1, tokens=5, resampled=1)
        for t, worker in ((1.0, "rollout/0"), (3.0, "rollout/1"), (4.0, "rollout/0"))
    ]
    found = handed_on(events, seat="rollout/0", since_s=2.0)
    assert found is not None
    assert found.time_s == 4.0
    assert handed_on(events, seat="rollout/0", since_s=5.0) is None
