"""The copy is spread over the available window, and speeds up when training had to wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ckpt.snapshot.pacing import FULL_SPEED, LEAST_WORK, Pacer, pause_s

SECONDS = st.floats(0, 1e4)
RATES = st.one_of(st.just(0.0), st.floats(1e6, 1e11))


def test_nothing_is_held_back_before_a_window_is_known_or_when_switched_off() -> None:
    assert Pacer().speed(10**9) == FULL_SPEED
    assert Pacer(enabled=False, window_s=1).speed(10**9) == FULL_SPEED


def test_the_copy_takes_its_share_of_the_window() -> None:
    assert Pacer(window_s=2, share=0.5).speed(10**9) == pytest.approx(10**9)


def test_a_copy_that_begins_late_is_faster_and_may_not_be_late_for_long() -> None:
    pacer = Pacer(window_s=2, share=0.5)
    assert pacer.speed(10**9, late_s=0.5) == pytest.approx(2 * 10**9)
    assert pacer.speed(10**9, late_s=1.5) == FULL_SPEED
    assert pacer.patience_s == 0.5
    assert Pacer().patience_s == Pacer(enabled=False, window_s=2).patience_s == 0


def test_in_a_long_step_the_copy_is_done_early_at_a_quarter_of_a_core() -> None:
    long, short = (Pacer(window_s=s, share=0.5, rate=10**9) for s in (100, 2))
    assert long.speed(10**9) == LEAST_WORK * 10**9
    assert short.speed(10**9) == pytest.approx(10**9)


def test_the_rate_is_the_mean_of_those_that_are_known() -> None:
    first = Pacer().after(window_s=1, waited_s=0, rate=2e9)
    assert first.rate == 2e9
    assert first.after(window_s=1, waited_s=0).rate == 2e9
    assert 2e9 < first.after(window_s=1, waited_s=0, rate=4e9).rate < 3e9


@given(SECONDS, RATES, st.integers(1, 10**12), SECONDS)
def test_a_known_rate_makes_no_copy_slower_and_lets_no_thread_rest_longer(
    window_s: float, rate: float, nbytes: int, late_s: float
) -> None:
    speed = Pacer(window_s=window_s, rate=rate).speed(nbytes, late_s=late_s)
    assert speed >= Pacer(window_s=window_s).speed(nbytes, late_s=late_s)
    if rate and speed != FULL_SPEED:
        assert nbytes / speed <= nbytes / rate / LEAST_WORK * (1 + 1e-9)


def test_a_wait_makes_the_next_copy_faster_and_calm_ones_slower_again() -> None:
    pacer = Pacer(window_s=1.0, share=0.5)
    hurried = pacer.after(window_s=1.0, waited_s=0.2)
    assert hurried.speed(10**9) > pacer.speed(10**9)
    calm = hurried.after(window_s=1.0, waited_s=0.0)
    assert pacer.speed(10**9) < calm.speed(10**9) < hurried.speed(10**9)


def test_a_shorter_window_is_believed_at_once_and_a_longer_one_slowly() -> None:
    pacer = Pacer(window_s=1.0)
    assert pacer.after(window_s=0.1, waited_s=0).window_s == 0.1
    assert 1.0 < pacer.after(window_s=10.0, waited_s=0).window_s < 5.0


@given(st.lists(st.tuples(SECONDS, SECONDS, RATES), max_size=50))
def test_whatever_is_seen_the_expected_window_and_the_share_stay_within_bounds(
    seen: list[tuple[float, float, float]],
) -> None:
    pacer = Pacer()
    for window_s, waited_s, rate in seen:
        before, pacer = pacer, pacer.after(window_s=window_s, waited_s=waited_s, rate=rate)
        assert 0.1 <= pacer.share <= 0.8
        assert pacer.window_s <= max(window_s, before.window_s)
        assert pacer.speed(10**9) > 0


@given(st.floats(1, 1e12), st.integers(0, 10**12), st.floats(0, 1e6))
def test_a_rest_is_just_what_is_missing(speed: float, copied: int, elapsed_s: float) -> None:
    rest_s = pause_s(speed=speed, copied_bytes=copied, elapsed_s=elapsed_s)
    assert rest_s >= 0
    assert elapsed_s + rest_s >= copied / speed * (1 - 1e-9)


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="window"):
        Pacer(window_s=-1)
    with pytest.raises(ValueError, match="share"):
        Pacer(share=0)
    with pytest.raises(ValueError, match="rate"):
        Pacer(rate=-1)
