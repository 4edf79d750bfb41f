"""A long read is told of every few seconds, a short one not at all."""

from __future__ import annotations

from holdfast.elastic.tracked.sources.pacing import Pacing


def test_it_tells_no_more_than_once_in_a_while_and_not_the_end() -> None:
    times = iter([100.0, 101.0, 110.0, 111.0, 119.9, 120.0, 140.0])
    told: list[tuple[int, int, float]] = []
    paced = Pacing(lambda *progress: told.append(progress), every_s=10.0, clock=lambda: next(times))
    for done in (5, 20, 30, 60, 61, 90):
        paced(done, 90)
    assert told == [(20, 90, 10.0), (61, 90, 20.0)]


def test_nothing_that_is_in_place_gives_no_rate() -> None:
    times = iter([0.0, 60.0, 61.0])
    told: list[int] = []
    paced = Pacing(lambda done, *_: told.append(done), every_s=10.0, clock=lambda: next(times))
    paced(0, 90)
    paced(1, 90)
    assert told == [1]
