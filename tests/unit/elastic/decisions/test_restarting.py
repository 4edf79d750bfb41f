"""An agent's restarts are counted only while the job does not get on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.elastic.decisions.restarting import Restarts, again


def test_deaths_in_a_row_without_progress_are_counted_and_slowed_down() -> None:
    found, pauses = Restarts(), []
    for _ in range(9):
        after = again(found, progress=-1, most=9, now_s=100.0)
        assert after is not None
        pauses.append(after.due_s - 100.0)
        found = after
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert again(found, progress=-1, most=9, now_s=100.0) is None


def test_none_is_started_again_where_none_may_be() -> None:
    assert again(Restarts(), progress=5, most=0, now_s=0.0) is None


@given(st.integers(1, 5), st.integers(1, 200))
def test_a_job_that_gets_on_survives_any_number_of_deaths(most: int, deaths: int) -> None:
    found = Restarts()
    for step in range(deaths):
        after = again(found, progress=step, most=most, now_s=1.0)
        assert after is not None
        assert (after.count, after.due_s) == (1, 1.0)
        found = after
    for _ in range(most - 1):
        after = again(found, progress=0, most=most, now_s=1.0)
        assert after is not None
        found = after
    assert again(found, progress=0, most=most, now_s=1.0) is None
