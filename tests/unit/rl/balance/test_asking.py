"""Rank 0 asks for a move when all workers are at work, and takes back what it no longer wants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from holdfast import elastic
from holdfast.adapters.rl.balance.asking import RoleBalance
from holdfast.adapters.rl.balance.choosing import SETTLING_STEPS, Balancer, JobShape
from holdfast.adapters.rl.balance.settings import BalanceConfig
from holdfast.elastic.events import RolesAsked
from holdfast.elastic.membership.records import NodeRecord, Roster, WorkerRecord, WorkerState

STEP_S, WINDOW = 10.0, 2


def at_work(seat: str, state: WorkerState = WorkerState.ACTIVE) -> WorkerRecord:
    return WorkerRecord(seat=seat, incarnation=seat, pid=1, attempt=1, state=state)


class Leader:
    """Rank 0 with a roster of its choice; time goes by in steps."""

    def __init__(self, *seats: str) -> None:
        self.workers = [at_work(seat) for seat in seats]
        self.told: list[RolesAsked] = []
        self.now_s = 0.0
        self.balancer = Balancer(
            shape=JobShape(microbatches=8), settings=BalanceConfig(window=WINDOW)
        )
        self.balance = RoleBalance(self.balancer, role="rollout")
        session = SimpleNamespace(roster=self.roster, emit=self.told.append)
        self.session = cast("elastic.Session", session)

    def roster(self) -> Roster:
        node = NodeRecord(
            node="n0",
            incarnation="n0",
            domain="n0",
            sidecar="tcp://n0",
            slots={},
            workers=tuple(self.workers),
        )
        return Roster(nodes=(node,))

    def begin(self) -> None:
        self.balance.begin(self.session)

    def steps(self, count: int, *, waits: float) -> None:
        for _ in range(count):
            self.now_s += STEP_S
            self.balance.step(
                now_s=self.now_s, waited_s=waits * STEP_S, working=1.0 - waits / 10, left=1000
            )


def job(*seats: str) -> Leader:
    leader = Leader(*(seats or ("trainer/0", "trainer/1", "rollout/0", "rollout/1")))
    leader.begin()
    leader.steps(1 + SETTLING_STEPS, waits=0.9)
    return leader


def test_an_ask_has_the_numbers_by_role_and_the_shares() -> None:
    leader = job()
    leader.steps(WINDOW, waits=0.9)
    (asked,) = leader.told
    assert asked.roles == {"trainer": 1, "rollout": 3}
    assert (asked.waits, asked.works, asked.step_s) == (0.9, 0.91, STEP_S)
    assert asked.expected_s < STEP_S


def test_what_is_no_longer_wanted_is_taken_back_once() -> None:
    leader = job()
    leader.steps(WINDOW, waits=0.9)
    leader.steps(3 * WINDOW, waits=0.02)
    assert [each.roles for each in leader.told] == [{"trainer": 1, "rollout": 3}, {}]


def test_nothing_is_asked_while_a_worker_that_was_there_is_missing() -> None:
    leader = job()
    leader.steps(1, waits=0.9)
    leader.workers[3] = at_work("rollout/1", WorkerState.STARTING)
    leader.steps(4 * WINDOW, waits=0.9)
    assert leader.told == []


def test_nothing_is_asked_where_nobody_samples() -> None:
    leader = job("trainer/0", "trainer/1")
    leader.steps(4 * WINDOW, waits=0.9)
    assert leader.told == []


def test_a_change_costs_what_the_first_steps_after_it_took() -> None:
    leader = job()
    before = leader.balancer.move_s
    leader.now_s += 60.0
    leader.begin()
    leader.steps(1, waits=0.0)
    assert (before, leader.balancer.move_s) == (5.0, 70.0)
