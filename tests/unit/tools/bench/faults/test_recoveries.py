"""The recovery that a job's events describe."""

from __future__ import annotations

from functools import partial

import pytest

from holdfast.elastic.events import (
    Detected,
    Event,
    GenerationProposed,
    RankReformed,
    StateRestored,
    StepDone,
)
from holdfast.tools.bench.faults.recoveries import (
    after_change,
    after_fault,
    after_loss,
    after_restart,
)


def step(t: float, number: int, generation: int, rank: int, *, seconds: float = 0.5) -> Event:
    seat = f"trainer/{rank}"
    return StepDone(time_s=t, step=number, generation=generation, seat=seat, start_s=t - seconds)


def seen(t: float, what: str) -> Event:
    return Detected(time_s=t, what=what, victim="trainer/2")


def proposed(t: float, generation: int) -> Event:
    return GenerationProposed(time_s=t, generation=generation)


def restored(t: float, generation: int, rank: int) -> Event:
    return StateRestored(time_s=t, generation=generation, seat=f"trainer/{rank}")


def grew(t: float, generation: int, world: int, rank: int) -> Event:
    return RankReformed(time_s=t, generation=generation, world=world, seat=f"trainer/{rank}")


FAULT = [
    *(step(9.0, 4, 1, rank) for rank in range(3)),
    *(step(9.6 + rank / 100, 5, 1, rank) for rank in range(3)),
    seen(10.02, "exit"),
    proposed(10.10, 2),
    grew(10.15, 2, 2, 0),
    grew(10.16, 2, 2, 1),
    restored(10.20, 2, 0),
    restored(10.22, 2, 1),
    step(10.73, 5, 2, 0),
    step(10.75, 5, 2, 1),
    step(11.24, 6, 2, 0),
    step(11.25, 6, 2, 1),
]


def test_a_fault_ends_when_every_rank_trains_again() -> None:
    for seen in range(len(FAULT)):
        assert after_fault(FAULT[:seen], killed_s=10.0) is None
    found = after_fault(FAULT, killed_s=10.0)
    assert found is not None
    assert (found.generation, found.world, found.lost_steps) == (2, 2, 1)
    assert found.pause_s == pytest.approx(0.25)
    assert found.step_s - found.began_s == pytest.approx(0.75)
    assert found.new_s - found.began_s == pytest.approx(1.25)
    assert list(found.phases().values()) == pytest.approx([0.02, 0.08, 0.06, 0.06, 0.03])


def test_a_join_pauses_from_the_last_step_before_it_to_the_first_after() -> None:
    joined = [
        *FAULT,
        seen(11.30, "join"),
        proposed(11.40, 3),
        *(grew(11.5, 3, 3, rank) for rank in range(3)),
        *(restored(11.6, 3, rank) for rank in range(3)),
        *(step(12.2, 7, 3, rank) for rank in range(3)),
    ]
    assert after_change(FAULT, since_s=10.0, world=3) is None
    assert after_change(joined[:-1], since_s=10.0, world=3) is None
    found = after_change(joined, since_s=10.0, world=3)
    assert found is not None
    assert (found.world, found.lost_steps) == (3, 0)
    assert found.pause_s == pytest.approx(11.7 - 11.25)
    assert all(seconds > 0 for seconds in found.phases().values())


def test_a_generation_in_which_no_step_was_begun_is_part_of_the_recovery() -> None:
    twice = [*FAULT[:8], proposed(10.3, 3)]
    twice += [grew(10.4, 3, 3, rank) for rank in range(3)]
    twice += [step(11.0, 5, 3, rank) for rank in range(3)]
    twice += [step(11.5, 6, 3, rank) for rank in range(3)]
    found = after_fault(twice, killed_s=10.0)
    assert found is not None
    assert (found.generation, found.world) == (3, 3)
    assert found.pause_s == pytest.approx(0.5)


def test_replicas_go_on_each_in_its_own_time() -> None:
    events = [
        *(step(9.0, 4, 1, rank) for rank in range(3)),
        grew(10.3, 2, 2, 1),
        step(10.9, 5, 2, 1),
        step(11.6, 6, 2, 1),
        step(11.7, 6, 2, 2),
    ]
    assert after_loss(events[:-1], killed_s=10.0, others=2) is None
    found = after_loss(events, killed_s=10.0, others=2)
    assert found is not None
    assert (found.generation, found.world, found.lost_steps) == (2, 2, 0)
    assert found.pause_s == pytest.approx(1.2)
    assert found.useful_s == pytest.approx(1.7)


def test_a_run_that_was_killed_whole_counts_its_generations_anew() -> None:
    again = [
        *(grew(13.0, 1, 3, rank) for rank in range(3)),
        *(restored(13.5, 1, rank) for rank in range(3)),
        *(step(14.5, 5, 1, rank) for rank in range(3)),
        *(step(15.0, 6, 1, rank) for rank in range(3)),
        *(step(15.5 + rank / 10, 7, 1, rank) for rank in range(3)),
    ]
    look = partial(after_restart, before=FAULT, killed_s=11.5)
    assert all(look(again[:seen]) is None for seen in range(len(again)))
    found = look(again)
    assert found is not None
    assert (found.lost_steps, found.pause_s) == (2, pytest.approx(2.5))
    assert found.useful_s == pytest.approx(4.2)
    assert list(found.phases()) == ["form", "restore", "begin"]
