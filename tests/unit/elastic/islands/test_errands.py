"""The courier's thread: it goes round, brings news, and its errors come to the training."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.errors import SeaError
from holdfast.elastic.islands.errands import Errands
from holdfast.elastic.islands.haul.freight import Freight
from holdfast.elastic.islands.mailbox import Mailbox

DEADLINE_S = 60.0


class Rounds:
    """Stands for a courier: counts its rounds, and fails as it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.count, self.error, self.brings = 0, error, False
        self.freight = Freight(Mailbox(LocalStore("/nowhere")))
        self.reached = threading.Semaphore(0)

    def turn(self) -> bool:
        self.count += 1
        self.reached.release()
        if self.error is not None:
            raise self.error
        brings, self.brings = self.brings, False
        return brings


def _errands(rounds: Any, *, patience_s: float = 600.0) -> Errands:
    return Errands(rounds, patience_s=patience_s)


def test_training_can_wait_for_the_next_round() -> None:
    rounds = Rounds()
    with _errands(rounds) as errands:
        before = rounds.count
        errands.waiting()(DEADLINE_S)
        assert rounds.count > before
        errands.check()
    ended = rounds.count
    errands.close()
    assert rounds.count == ended


def test_a_long_wait_makes_few_rounds() -> None:
    rounds, waits = Rounds(), 30
    with _errands(rounds) as errands:
        wait = errands.waiting()
        began_s = time.monotonic()
        for _ in range(waits):
            wait(DEADLINE_S)
        elapsed_s, count = time.monotonic() - began_s, rounds.count
    assert elapsed_s > 2.0  # the pauses: 0, 0.01, 0.015 and so on to 0.1 s each
    # the thread's own pauses grow too: however slow the machine, it makes few more
    assert count <= waits + 10 + elapsed_s / 0.1


class Pauses(threading.Event):
    """Stands for the event that ends a pause: notes how long the pauses may last."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = threading.Event()
        self.since: list[float] = []
        self.several = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        if timeout == 0.5:
            self.longest.set()
        self.since.append(timeout)
        if len(self.since) > 2:
            self.several.set()
        return super().wait(timeout)


@pytest.mark.parametrize("sends", [True, False])
def test_rounds_come_soon_after_a_work_was_sent_and_only_then(sends: bool) -> None:
    with _errands(Rounds()) as errands:
        errands._called = pauses = Pauses()
        assert pauses.longest.wait(DEADLINE_S)
        pauses.since.clear()
        pauses.several.clear()
        (errands.call if sends else errands.look)()
        assert pauses.several.wait(DEADLINE_S)
    assert (min(pauses.since) < 0.5) == sends


def test_news_end_a_wait_at_once_and_the_next_begins_anew() -> None:
    rounds = Rounds()
    with _errands(rounds) as errands:
        wait = errands.waiting()
        for _ in range(20):
            wait(DEADLINE_S)
        wait._pause_s = DEADLINE_S  # nothing but news may end it
        rounds.brings = True
        errands.call()
        wait(DEADLINE_S)
        assert wait._pause_s == 0.0


def test_a_transfer_that_ends_is_news() -> None:
    rounds = Rounds()
    with _errands(rounds) as errands:
        wait = errands.waiting()
        wait._pause_s = DEADLINE_S
        rounds.freight.wake()
        wait(DEADLINE_S)


def test_news_that_came_before_the_wait_are_not_missed() -> None:
    rounds = Rounds()
    with _errands(rounds) as errands:
        wait = errands.waiting()
        rounds.freight.wake()
        while errands.brought == 0:
            assert rounds.reached.acquire(timeout=DEADLINE_S)
        wait._pause_s = DEADLINE_S
        wait(DEADLINE_S)


def test_a_store_that_fails_is_tried_again() -> None:
    rounds = Rounds(StoreError("away"))
    with _errands(rounds) as errands:
        for _ in range(3):
            assert rounds.reached.acquire(timeout=DEADLINE_S)
            errands.call()
        errands.check()


@pytest.mark.parametrize("error", [StoreError("away"), SeaError("two records")])
def test_what_lasts_comes_to_the_training(error: Exception) -> None:
    patience_s = 0.0 if isinstance(error, StoreError) else 600.0
    with _errands(Rounds(error), patience_s=patience_s) as errands:
        errands._thread.join(DEADLINE_S)
        with pytest.raises(type(error), match=str(error)):
            errands.check()
