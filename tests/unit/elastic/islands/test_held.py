"""Works that the loss guard may still undo are held back."""

from __future__ import annotations

import pytest
from doubles import seas

from holdfast.elastic.islands.courier import Outgoing
from holdfast.elastic.islands.held import HeldWorks
from holdfast.elastic.sea.settings import Islands

VIEW = seas.entered(seas.founded(Islands(every=4, portions=2, overlap=1)), "a")


def _work(step: int) -> Outgoing:
    return Outgoing(work=seas.work(VIEW, "a"), payload=b"", step=step)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_work_is_due_once_so_many_steps_after_its_own_are_complete(steps: int) -> None:
    held, first, second = HeldWorks(steps=steps), _work(4), _work(6)
    held.put([first])
    held.put([second])
    assert held.due(3 + steps) == []
    assert held.due(4 + steps) == [first]
    assert held.due(5 + steps) == []
    assert held.due(9 + steps) == [second]
    assert held.due(99) == []


def test_at_the_end_nothing_is_held_back() -> None:
    held, work = HeldWorks(steps=3), _work(4)
    held.put([work])
    held.end()
    assert held.due(4) == [work]


def test_works_of_a_state_that_is_given_up_are_dropped() -> None:
    held = HeldWorks(steps=1)
    held.put([_work(4)])
    held.clear()
    assert held.due(9) == []
