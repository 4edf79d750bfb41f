"""A logger gets the metrics of every step once, when the step is protected."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.elastic.config import Settings
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.logbook import Logbook, Position
from holdfast.elastic.tracked.cursor import Cursor


class Logger:
    """Remembers what it was handed; a book of a generation hands it over."""

    def __init__(self) -> None:
        self.position, self.cursor = Position(), Cursor(Settings())
        self.got: list[int] = []
        self.begin(self.cursor.state_dict())

    def begin(self, state: dict[str, Any], *, position: Position | None = None) -> None:
        """Begin a generation that restores ``state``."""
        self.cursor = Cursor(Settings())
        self.cursor.load_state_dict(state)
        self.position = position or self.position
        self.book = Logbook(self.cursor, self.position, leads=True)
        self.book.hand_to(lambda step, values: self.got.append(step), after=-1)
        self.book.agreed(*self.book.report())

    def step(self, *, protected: int) -> dict[str, Any]:
        """Complete a step while so many are protected; return the state to save."""
        self.book.hand_over(protected)
        self.book.agreed(*self.book.report())
        self.book.add(self.cursor.step, {"loss": 1.0})
        self.cursor.step += 1
        return self.cursor.state_dict()


def test_a_step_is_handed_over_once_it_is_protected() -> None:
    log = Logger()
    for protected in (0, 0, 1, 3):
        log.step(protected=protected)
    assert log.got == [0, 1, 2]
    log.book.finish(lambda: 4, check=lambda: None)
    assert log.got == [0, 1, 2, 3]


def test_a_restored_position_hands_nothing_over_again_in_a_living_process() -> None:
    log = Logger()
    states = [log.step(protected=protected) for protected in (0, 1, 2, 3, 4)]
    assert log.got == [0, 1, 2, 3]
    log.begin(states[3])  # step 4 is lost; its state knew less of what was handed over
    for protected in (4, 5):
        log.step(protected=protected)
    log.book.finish(lambda: 6, check=lambda: None)
    assert log.got == [0, 1, 2, 3, 4, 5]


def test_a_new_process_continues_from_the_position_in_the_state_or_that_of_others() -> None:
    log = Logger()
    states = [log.step(protected=protected) for protected in (0, 1, 2, 3)]
    log.begin(states[-1], position=Position())
    log.step(protected=4)
    assert log.got == [0, 1, 2, 3], "handed over by the dead process, then by the new one"
    log.begin(states[0], position=Position())
    log.book.agreed(1.0, 4.0)  # a survivor tells that four steps are handed over
    for protected in (1, 2, 3, 4, 5):
        log.step(protected=protected)
    assert log.got == [0, 1, 2, 3, 4]


def test_a_logger_that_has_steps_already_gets_the_next_ones() -> None:
    cursor, got = Cursor(Settings()), []
    book = Logbook(cursor, Position(), leads=True)
    book.hand_to(lambda step, values: got.append(step), after=1)
    book.agreed(*book.report())
    for step in range(4):
        book.add(step, {"loss": 0.0})
    book.finish(lambda: 4, check=lambda: None)
    assert got == [2, 3]


def test_nothing_is_kept_for_a_run_without_a_logger() -> None:
    cursor = Cursor(Settings())
    book = Logbook(cursor, Position(), leads=True)
    book.agreed(*book.report())
    book.add(0, {"loss": 1.0})
    assert cursor.waiting == []


def test_what_is_no_function_is_refused() -> None:
    book = Logbook(Cursor(Settings()), Position(), leads=True)
    with pytest.raises(ConfigError, match="give a function"):
        book.hand_to("log.csv", after=-1)  # type: ignore[arg-type]


def test_each_of_several_loggers_gets_the_steps_that_it_has_not() -> None:
    cursor, got = Cursor(Settings()), []
    book = Logbook(cursor, Position(), leads=True)
    book.hand_to(lambda step, values: got.append(("first", step)), after=1)
    book.hand_to(lambda step, values: got.append(("second", step)), after=0)
    book.agreed(*book.report())
    for step in range(3):
        book.add(step, {"loss": 0.0})
    book.finish(lambda: 3, check=lambda: None)
    assert got == [("second", 1), ("first", 2), ("second", 2)]


def test_a_step_may_have_begun_on_another_rank_once_the_one_before_is_over_here() -> None:
    position = Position()
    position.enter(0)
    assert position.reached == 1
    position.near_end(0)
    assert position.reached == 2, "another rank may be in step 1"
    position.enter(1)
    position.near_end(1)
    position.hold()
    assert position.reached == 2, "all ranks wait for the change of the world"


def test_steps_that_are_repeated_do_not_count_again() -> None:
    position = Position()
    for step in range(5):
        position.enter(step)
    for step in range(4):
        position.enter(step)
        position.near_end(step)
        assert position.reached == 5
    position.enter(4)
    position.near_end(4)
    assert position.reached == 6
