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
    rounds = Rounds()
    with _errands(rounds) as errands:
        wait = errands.waiting()
        began_s = time.monotonic()
        for _ in range(20):
            wait(DEADLINE_S)
    # 0 + 0.01 + 0.015 + ... up to 0.1 s each
    assert time.monotonic() - began_s > 1.0


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
