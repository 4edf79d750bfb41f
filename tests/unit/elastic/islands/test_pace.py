"""The time of an island's steps."""

from __future__ import annotations

from holdfast.elastic.islands.pace import OwnPace


def _timed(pace: OwnPace, now: list[float], seconds: float) -> None:
    pace.begin_step()
    now[0] += seconds
    pace.end_step()
    now[0] += 100  # it waits for others


def test_the_mean_of_the_steps_since_the_last_call_without_the_first_of_all() -> None:
    now = [0.0]
    pace = OwnPace(lambda: now[0])
    assert pace.take_us() == 0
    for seconds in (50, 2, 4):
        _timed(pace, now, seconds)
    assert pace.take_us() == 3_000_000
    assert pace.take_us() == 0
    _timed(pace, now, 1e-9)
    assert pace.take_us() == 1, "0 would say that it was not measured"


def test_a_step_that_was_not_seen_to_begin_does_not_count() -> None:
    now = [0.0]
    pace = OwnPace(lambda: now[0])
    _timed(pace, now, 1)
    pace.end_step()
    assert pace.take_us() == 0
