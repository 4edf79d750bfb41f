"""The place in the loop: when a step counts, and which draws a phase has."""

from __future__ import annotations

import pytest

from holdfast.elastic.config import Settings
from holdfast.elastic.loop.updates.place import LoopPlace
from holdfast.elastic.tracked.cursor import Cursor


@pytest.fixture
def place() -> LoopPlace:
    cursor = Cursor(Settings())
    cursor.step = 3
    found = LoopPlace(cursor, seed=7)
    found.begin_step()
    return found


def test_a_step_counts_once_the_loop_is_left_after_its_update(place: LoopPlace) -> None:
    place.has_gradients = True
    place.begin_phase()
    assert place.is_stepped
    assert place.completed == 3
    place.has_left = True
    assert place.completed == 4


@pytest.mark.parametrize("waits", [True, False])
def test_a_step_that_is_left_before_its_update_does_not_count(
    place: LoopPlace, waits: bool
) -> None:
    place.has_gradients, place.has_left = waits, True
    assert not place.is_stepped
    assert place.completed == 3


def test_gradients_that_wait_for_their_update_keep_a_later_phase_open(place: LoopPlace) -> None:
    place.begin_phase()
    place.has_gradients = True
    assert not place.is_stepped
    place.begin_phase()
    assert place.is_stepped


def test_every_phase_of_every_step_has_draws_of_its_own(place: LoopPlace) -> None:
    first = place.draws
    place.begin_phase()
    second = place.draws
    place.begin_step()
    assert place.draws == first
    assert first.microbatch(0) != second.microbatch(0)


def test_outside_of_steps_nothing_is_stepped(place: LoopPlace) -> None:
    place.begin_phase()
    place.end_step()
    assert not place.in_step
    assert not place.is_stepped
