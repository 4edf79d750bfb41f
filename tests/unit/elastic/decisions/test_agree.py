"""The decision of one agent, step by step: the whole path, and failures at each point."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import pytest
from doubles import fakes

from holdfast.elastic.decisions.agree import (
    AgreePatience,
    Decision,
    FenceWorkers,
    Finish,
    FirstSeen,
    Halt,
    Idle,
    Propose,
    WaitForFences,
    decide,
    faults,
    observe,
)
from holdfast.elastic.membership.records import (
    JobOutcome,
    JobSpec,
    NodeRecord,
    Seating,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView

READY, ACTIVE, DONE, DEAD, STARTING = (
    WorkerState.READY,
    WorkerState.ACTIVE,
    WorkerState.DONE,
    WorkerState.DEAD,
    WorkerState.STARTING,
)
POLICY = AgreePatience()


def trainer(number: int, state: WorkerState = ACTIVE, **more: object) -> WorkerRecord:
    ready_after = 3 if state is ACTIVE else 0
    made = fakes.worker(f"trainer/{number}", state, ready_after=ready_after)
    return msgspec.structs.replace(made, **more)


def parked(number: int) -> WorkerRecord:
    return trainer(number, READY, ready_after=4)


def running(*, fenced: int = 3) -> dict[str, NodeRecord]:
    """Generation 4 runs: rank 0 on a, rank 1 on b, c holds no rank."""
    return {
        "a": fakes.node("a", trainer(0), fenced=fenced),
        "b": fakes.node("b", trainer(1), fenced=fenced),
        "c": fakes.node("c", fenced=fenced),
    }


def fourth(nodes: dict[str, NodeRecord] | None = None, **more: NodeRecord | None) -> JobView:
    """Return the view of generation 4 with some nodes changed, or gone (None)."""
    were = running()
    record = fakes.generation(4, list(were.values()), ranks=[("a", trainer(0)), ("b", trainer(1))])
    now = {**were, **(nodes or {}), **more}
    return fakes.view(*(node for node in now.values() if node), generation=record)


def ask(
    *views: JobView,
    node: str = "a",
    times_s: Sequence[float] = (100.0,),
    policy: AgreePatience = POLICY,
    stand: bool = False,
    step_s: float = 0.0,
) -> tuple[Decision, str]:
    """Show an agent the views one after the other and return its last decision."""
    seen, answer = FirstSeen(), None
    for view, now_s in zip([*views] + [views[-1]] * len(times_s), times_s, strict=False):
        seen = observe(view, seen, now_s=now_s)
        answer = decide(
            view, seen, node=node, now_s=now_s, policy=policy, stand=stand, step_s=step_s
        )
    assert answer is not None
    return answer


# -- a generation that stands --------------------------------------------------------------------


def test_healthy_generation_stands() -> None:
    assert ask(fourth()) == (Idle(), "generation 4 stands")


def test_member_that_has_not_picked_up_the_record_is_no_fault() -> None:
    late = fakes.node("b", trainer(1, READY, ready_after=3), fenced=3)
    assert isinstance(ask(fourth(b=late))[0], Idle)


@pytest.mark.parametrize(
    ("name", "now", "reason"),
    [
        ("b", None, "node b was lost"),
        ("c", None, "node c was lost"),
        ("b", fakes.node("b", trainer(1, DEAD, ending="SIGKILL"), fenced=3),
         "trainer/1 on b died (SIGKILL)"),
        ("b", fakes.node("b", fenced=3), "trainer/1 on b is gone"),
        ("b", fakes.node("b", trainer(1, STARTING, incarnation="new"), fenced=3),
         "trainer/1 on b is gone"),
        ("b", fakes.node("b", parked(1), fenced=3), "trainer/1 on b left generation 4"),
        ("b", fakes.node("b", trainer(1), fenced=3, sidecar=False),
         "the sidecar of node b is down"),
        ("c", fakes.node("c", fenced=3, sidecar_starts=2),
         "node c was started again (its agent or sidecar ended)"),
        ("c", fakes.node("c", fenced=0, incarnation="c#2"),
         "node c was started again (its agent or sidecar ended)"),
        ("c", fakes.node("c", fenced=4), "node c fenced generation 4"),
    ],
)  # fmt: skip
def test_every_fault_makes_everyone_fence(name: str, now: NodeRecord | None, reason: str) -> None:
    view = fourth({name: now})  # type: ignore[dict-item]
    assert faults(view) == [reason]
    assert ask(view) == (FenceWorkers(generation=4), reason)


def test_unregistered_node_and_ended_job_do_nothing() -> None:
    assert isinstance(ask(fourth(a=None), node="a")[0], Idle)
    view = dataclasses.replace(fourth(b=None), outcome=JobOutcome(ok=False, message="no"))
    assert ask(view) == (Idle(), "the job has ended")


# -- the way to the next generation --------------------------------------------------------------


def after_loss_of_b(**more: NodeRecord | None) -> JobView:
    """b is gone; a has fenced and parked its trainer; c has fenced."""
    nodes: dict[str, NodeRecord | None] = {
        "a": fakes.node("a", parked(0), fenced=4),
        "b": None,
        "c": fakes.node("c", fenced=4),
    }
    return fourth({**nodes, **more})  # type: ignore[dict-item]


def test_everyone_fenced_then_the_first_node_proposes() -> None:
    decision, reason = ask(after_loss_of_b())
    assert isinstance(decision, Propose)
    assert decision.expected == 1
    assert decision.record.number == 5
    assert [member.seat for member in decision.record.members] == ["trainer/0"]
    assert decision.record.reason == reason


def test_the_others_propose_later_in_turn() -> None:
    decision, _ = ask(after_loss_of_b(), node="c")
    assert decision == WaitForFences(until_s=100.0 + POLICY.stagger_s)
    late = 100.0 + POLICY.stagger_s
    assert isinstance(ask(after_loss_of_b(), node="c", times_s=(100.0, late))[0], Propose)


def test_node_without_trainers_is_waited_for_too() -> None:
    view = after_loss_of_b(c=fakes.node("c", fenced=3))
    assert ask(view) == (WaitForFences(), "waiting for c to fence generation 4")


def test_node_that_vanishes_while_others_fenced_is_not_waited_for() -> None:
    assert isinstance(ask(after_loss_of_b(c=None))[0], Propose)


def test_worker_that_dies_after_its_node_fenced_is_not_a_member() -> None:
    view = after_loss_of_b(
        a=fakes.node("a", trainer(0, DEAD), fenced=4),
        c=fakes.node("c", trainer(2, READY), fenced=4),
    )
    decision, _ = ask(view)
    assert isinstance(decision, Propose)
    assert [member.seat for member in decision.record.members] == ["trainer/2"]


def test_nothing_is_proposed_without_a_ready_trainer() -> None:
    view = after_loss_of_b(a=fakes.node("a", trainer(0, DEAD), fenced=4))
    assert ask(view) == (WaitForFences(), "0 of 1 trainers are ready, waiting for 1 more")


def test_when_nobody_survived_those_who_start_together_form_one_world() -> None:
    seats = [Seating(seat=f"trainer/{i}", node="a", attempt=2) for i in range(2)]

    def anew(state: WorkerState, **more: object) -> JobView:
        workers = (trainer(i, s, attempt=2, **more) for i, s in enumerate((READY, state)))
        view = after_loss_of_b(a=fakes.node("a", *workers, fenced=4))
        renamed = [
            msgspec.structs.replace(w, incarnation=f"{w.seat}#2") for w in view.nodes["a"].workers
        ]
        node = msgspec.structs.replace(view.nodes["a"], workers=tuple(renamed))
        return dataclasses.replace(view, nodes={**view.nodes, "a": node}, seating=tuple(seats))

    until_s = 100.0 + POLICY.join_settle_max_s
    decision, reason = ask(anew(STARTING))
    assert (decision, reason) == (
        WaitForFences(until_s=until_s),
        "no trainer survived, trainer/1 still starting",
    )
    late, _ = ask(anew(STARTING), times_s=(100.0, until_s))
    assert isinstance(late, Propose) and len(late.record.members) == 1
    whole, _ = ask(anew(READY))
    assert isinstance(whole, Propose) and len(whole.record.members) == 2
    fixed, _ = ask(anew(STARTING, spec=JobSpec(dp=1)))
    assert isinstance(fixed, Propose)


def test_ready_worker_of_a_node_that_has_not_fenced_is_waited_for() -> None:
    view = after_loss_of_b(c=fakes.node("c", trainer(2, READY), fenced=3))
    assert isinstance(ask(view)[0], WaitForFences)


def test_newcomer_is_waited_for_a_while_then_left_out() -> None:
    newcomer = fakes.node("d", trainer(2, READY), fenced=0, incarnation="d#1")
    view = after_loss_of_b(d=newcomer)
    assert ask(view)[0] == WaitForFences(until_s=100.0 + POLICY.newcomer_wait_s)
    assert ask(view, node="d")[0] == FenceWorkers(generation=4)
    decision, _ = ask(view, times_s=(100.0, 100.0 + POLICY.newcomer_wait_s))
    assert isinstance(decision, Propose)
    assert set(decision.record.nodes) == {"a", "c"}


def test_newcomer_without_inventory_is_taken_in() -> None:
    newcomer = fakes.node("d", trainer(2, READY), fenced=4, inventory=None)
    decision, _ = ask(after_loss_of_b(d=newcomer))
    assert isinstance(decision, Propose)
    assert [member.seat for member in decision.record.members] == ["trainer/0", "trainer/2"]


def test_failure_after_a_proposal_starts_over() -> None:
    decision, _ = ask(after_loss_of_b())
    assert isinstance(decision, Propose)
    fifth = decision.record
    died = fakes.view(
        fakes.node("a", trainer(0, DEAD), fenced=4), fakes.node("c", fenced=4), generation=fifth
    )
    assert ask(died) == (FenceWorkers(generation=5), "trainer/0 on a died")


def test_fixed_size_waits_for_the_replacement() -> None:
    spec = JobSpec(dp=2)
    one = trainer(0, READY, ready_after=4, spec=spec)
    view = after_loss_of_b(a=fakes.node("a", one, fenced=4))
    assert ask(view) == (WaitForFences(), "1 of 2 trainers are ready, waiting for 1 more")
    two = trainer(1, READY, incarnation="new", spec=spec)
    view = after_loss_of_b(a=fakes.node("a", one, fenced=4), c=fakes.node("c", two, fenced=4))
    assert isinstance(ask(view)[0], Propose)


def test_more_trainers_than_seats_is_a_clear_end() -> None:
    one = trainer(0, READY, ready_after=4, spec=JobSpec(dp=8))
    decision, reason = ask(after_loss_of_b(a=fakes.node("a", one, fenced=4)))
    assert isinstance(decision, Finish)
    assert not decision.outcome.ok
    assert reason == "the job needs 8 trainers but has only 2 seats: start more trainers"


def test_trainers_that_disagree_end_the_job() -> None:
    other = trainer(1, READY, incarnation="new", spec=JobSpec(keep=5))
    decision, reason = ask(after_loss_of_b(c=fakes.node("c", other, fenced=4)))
    assert isinstance(decision, Finish)
    assert not decision.outcome.ok
    assert "run the same script with the same settings everywhere" in reason


# -- joins ---------------------------------------------------------------------------------------


def test_joiner_is_let_in_once_it_has_settled() -> None:
    joiner = fakes.node("c", trainer(2, READY, ready_after=0), fenced=3)
    view = fourth(c=joiner)
    settled_s = 100.0 + POLICY.holdoff_s
    assert ask(view)[0] == Idle(until_s=settled_s)
    assert ask(view, times_s=(100.0, settled_s)) == (
        FenceWorkers(generation=4),
        "trainer/2 on c wants to join",
    )


def test_a_joiner_waits_for_the_end_of_the_step() -> None:
    joiner = fakes.node("c", trainer(2, READY, ready_after=0), fenced=3)
    view, settled_s = fourth(c=joiner), 100.0 + POLICY.holdoff_s
    times_s = (100.0, settled_s)
    halt = Halt(generation=4, until_s=settled_s + 7.0)
    assert ask(view, times_s=times_s, step_s=7.0) == (halt, "trainer/2 on c wants to join")
    assert ask(view, times_s=times_s, step_s=7.0, stand=True)[0] == FenceWorkers(generation=4)
    late_s = (100.0, settled_s + 7.0)
    assert ask(view, times_s=late_s, step_s=7.0)[0] == FenceWorkers(generation=4)


def test_a_fault_does_not_wait_for_the_end_of_the_step() -> None:
    view = fourth(b=fakes.node("b", trainer(1, DEAD), fenced=3))
    assert ask(view, step_s=7.0)[0] == FenceWorkers(generation=4)


def test_trainers_that_stand_go_on_though_the_joiner_is_gone() -> None:
    decision, reason = ask(fourth(), stand=True, step_s=7.0)
    assert decision == FenceWorkers(generation=4)
    assert "gone" in reason


def test_a_node_that_leaves_does_not_fence_for_its_own_trainers_that_stand() -> None:
    leaver = msgspec.structs.replace(fakes.node("a", trainer(0), fenced=3), leaving=1)
    assert ask(fourth(a=leaver), stand=True, step_s=7.0)[0] == Idle()


def test_each_further_joiner_starts_the_wait_anew_up_to_a_bound() -> None:
    policy = AgreePatience(holdoff_s=0.0)
    one = fourth(c=fakes.node("c", trainer(2, READY), fenced=3))
    two = fourth(c=fakes.node("c", trainer(2, READY), trainer(3, READY), fenced=3))
    decision, _ = ask(one, two, times_s=(100.0, 100.08), policy=policy)
    assert decision == Idle(until_s=pytest.approx(100.18))
    decision, _ = ask(one, two, times_s=(100.0, 100.99), policy=policy)
    assert decision == Idle(until_s=pytest.approx(101.0))


def test_spares_of_a_fixed_size_do_not_join() -> None:
    spec = JobSpec(dp=2)
    view = fourth(
        a=fakes.node("a", trainer(0, spec=spec), fenced=3),
        b=fakes.node("b", trainer(1, spec=spec), fenced=3),
        c=fakes.node("c", trainer(2, READY, spec=spec), fenced=3),
    )
    assert ask(view, times_s=(100.0, 200.0)) == (Idle(), "generation 4 stands")


def test_other_roles_are_no_joiners() -> None:
    rollout = fakes.worker("rollout/0", READY)
    view = fourth(c=fakes.node("c", rollout, fenced=3))
    assert ask(view, times_s=(100.0, 200.0))[0] == Idle()


def test_node_outside_the_group_joins_when_no_trainer_is_coming_there() -> None:
    view = fourth(d=fakes.node("d"))
    assert ask(view)[0] == Idle(until_s=100.0 + POLICY.node_settle_s)
    decision, reason = ask(view, times_s=(100.0, 100.0 + POLICY.node_settle_s))
    assert decision == FenceWorkers(generation=4)
    assert reason == "node d wants to join"


def test_node_outside_the_group_waits_for_its_starting_trainer() -> None:
    view = dataclasses.replace(
        fourth(d=fakes.node("d", trainer(2, STARTING))),
        seating=(Seating(seat="trainer/2", node="d", attempt=1),),
    )
    assert ask(view, times_s=(100.0, 200.0))[0] == Idle()


def test_a_node_whose_trainer_started_for_long_joins_at_the_end_of_a_step_too() -> None:
    seating = (Seating(seat="trainer/2", node="d", attempt=1),)
    starting, ready = (
        dataclasses.replace(
            fourth(d=fakes.node("d", trainer(2, state, ready_after=0), fenced=3)), seating=seating
        )
        for state in (STARTING, READY)
    )
    settled_s = 200.0 + POLICY.join_settle_s
    decision, reason = ask(starting, ready, ready, times_s=(100.0, 200.0, settled_s), step_s=7.0)
    assert decision == Halt(generation=4, until_s=settled_s + 7.0)
    assert reason == "trainer/2 on d wants to join; node d wants to join"


# -- the first generation ------------------------------------------------------------------------


def test_first_generation_waits_for_seated_trainers_that_start() -> None:
    seats = [Seating(seat=f"trainer/{i}", node="a", attempt=1) for i in range(2)]
    view = fakes.view(fakes.node("a", trainer(0, READY), trainer(1, STARTING)), seating=seats)
    decision, reason = ask(view)
    assert decision == WaitForFences(until_s=100.0 + POLICY.start_wait_s)
    assert reason == "1 trainers are ready, trainer/1 still starting"
    late = ask(view, times_s=(100.0, 100.0 + POLICY.start_wait_s))[0]
    assert isinstance(late, Propose)
    assert len(late.record.members) == 1
    both = fakes.view(fakes.node("a", trainer(0, READY), trainer(1, READY)), seating=seats)
    whole = ask(both)[0]
    assert isinstance(whole, Propose)
    assert len(whole.record.members) == 2


def test_fixed_size_starts_as_soon_as_it_can() -> None:
    spec = JobSpec(dp=1)
    seats = [Seating(seat=f"trainer/{i}", node="a", attempt=1) for i in range(2)]
    view = fakes.view(
        fakes.node("a", trainer(0, READY, spec=spec), trainer(1, STARTING)), seating=seats
    )
    assert isinstance(ask(view)[0], Propose)


def test_first_generation_waits_for_the_sidecars_that_start() -> None:
    spec = JobSpec(dp=1)
    view = fakes.view(fakes.node("a", trainer(0, READY, spec=spec)), fakes.node("b", sidecar=False))
    decision, reason = ask(view)
    assert decision == WaitForFences(until_s=100.0 + POLICY.start_wait_s)
    assert reason == "1 trainers are ready, the sidecar of b still starting"
    assert isinstance(ask(view, times_s=(100.0, 100.0 + POLICY.start_wait_s))[0], Propose)


def test_trainers_that_end_without_a_generation_end_the_job() -> None:
    seats = [Seating(seat="trainer/0", node="a", attempt=1)]
    decision, _ = ask(fakes.view(fakes.node("a", trainer(0, DONE)), seating=seats))
    assert isinstance(decision, Finish)
    assert decision.outcome.ok


# -- the end -------------------------------------------------------------------------------------


def test_job_ends_when_every_member_is_done() -> None:
    view = fourth(
        a=fakes.node("a", trainer(0, DONE, result={"loss": 1}), fenced=3),
        b=fakes.node("b", trainer(1, DONE), fenced=3),
    )
    decision, _ = ask(view)
    assert isinstance(decision, Finish)
    assert decision.outcome.ok
    assert decision.outcome.result == {"loss": 1}


def test_one_done_waits_for_the_rest_and_lets_nobody_join() -> None:
    view = fourth(
        a=fakes.node("a", trainer(0, DONE), fenced=3),
        c=fakes.node("c", trainer(2, READY), fenced=3),
    )
    decision, reason = ask(view, times_s=(100.0, 200.0))
    assert decision == Idle()
    assert reason == "the work is complete; waiting for trainer/1"


@pytest.mark.parametrize(
    "last",
    [None, fakes.node("b", trainer(1, DEAD), fenced=3), fakes.node("b", parked(1), fenced=4)],
)
def test_one_done_and_nobody_at_work_is_a_good_end(last: NodeRecord | None) -> None:
    view = fourth(a=fakes.node("a", trainer(0, DONE), fenced=3), b=last)
    decision, reason = ask(view, node="c")
    assert isinstance(decision, Finish)
    assert decision.outcome.ok, reason


def test_one_done_one_dead_frees_the_others_from_the_closing_barrier() -> None:
    nodes = [fakes.node(name, trainer(i), fenced=3) for i, name in enumerate("abc")]
    record = fakes.generation(4, nodes, ranks=[(n, trainer(i)) for i, n in enumerate("abc")])
    a = fakes.node("a", trainer(0, DONE), fenced=3)
    b = fakes.node("b", trainer(1, DEAD), fenced=3)
    c = fakes.node("c", trainer(2), fenced=3)
    assert ask(fakes.view(a, b, c, generation=record), node="c")[0] == FenceWorkers(generation=4)
    c_fenced = fakes.node("c", parked(2), fenced=4)
    decision, _ = ask(fakes.view(a, b, c_fenced, generation=record))
    assert isinstance(decision, Finish)
    assert decision.outcome.ok
