"""The parts of agents in a large job: who decides, what is told, what a follower does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from doubles import fakes

from holdfast.elastic.decisions import agree, deciding
from holdfast.elastic.decisions.part import AgentPart, Claim, Tell
from holdfast.elastic.membership.following import following, stand_ins
from holdfast.elastic.membership.readiness import late_nodes
from holdfast.elastic.membership.records import (
    Bulletin,
    Decider,
    GenerationRecord,
    NodeRecord,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView, identity

NAMES = ("a", "b", "c", "d")


def worker(name: str, state: WorkerState = WorkerState.ACTIVE, attempt: int = 1) -> WorkerRecord:
    return fakes.worker(f"trainer/{NAMES.index(name)}", state, attempt=attempt)


def records(fenced: int = 0) -> list[NodeRecord]:
    return [fakes.node(name, worker(name), fenced=fenced) for name in NAMES]


def generation(number: int = 3) -> GenerationRecord:
    nodes = records()
    return fakes.generation(number, nodes, ranks=[(n.node, n.workers[0]) for n in nodes])


def decider(name: str) -> Decider:
    return Decider(node=name, incarnation=f"{name}#1")


def followed(
    bulletin: Bulletin | None = None,
    *,
    number: int = 3,
    deciders: Mapping[int, Decider] | None = None,
) -> JobView:
    """Return what a follower sees: the keys of the whole job."""
    view = fakes.view(generation=generation(number), wanted={"trainer": 4})
    places = {0: decider("a")} if deciders is None else deciders
    return replace(view, bulletin=bulletin, deciders=places)


def watched(
    bulletin: Bulletin | None = None, *, deciders: Mapping[int, Decider] | None = None
) -> JobView:
    """Return what an agent sees that watches all nodes."""
    nodes = {each.node: each for each in records(fenced=2)}
    return replace(followed(bulletin, deciders=deciders), nodes=nodes)


OWN = fakes.node("c", worker("c"), fenced=2)


# -- following ---------------------------------------------------------------------------------


def test_follower_fences_only_the_generation_that_it_knows_and_that_is_over() -> None:
    said = Bulletin(number=4, over=3, reason="node b was lost")
    decision, reason = deciding.follow(followed(said), own=OWN, stand=False)
    assert decision == agree.FenceWorkers(generation=3)
    assert reason == "node b was lost"
    later = followed(said, number=4)
    assert isinstance(deciding.follow(later, own=OWN, stand=False)[0], agree.Idle)
    fenced = msgspec.structs.replace(OWN, fenced=3)
    assert isinstance(
        deciding.follow(followed(said), own=fenced, stand=False)[0], agree.WaitForFences
    )


def test_follower_halts_and_then_fences() -> None:
    said = followed(Bulletin(number=4, halt=3, reason="trainer/4 on e wants to join"))
    decision, reason = deciding.follow(said, own=OWN, stand=False)
    assert isinstance(decision, agree.Halt)
    assert decision.generation == 3
    assert "wants to join" in reason
    assert deciding.follow(said, own=OWN, stand=True)[0] == agree.FenceWorkers(generation=3)
    old = followed(Bulletin(number=4, halt=2))
    assert isinstance(deciding.follow(old, own=OWN, stand=False)[0], agree.Idle)


@pytest.mark.parametrize("said", [None, Bulletin(number=1), Bulletin(number=1, over=9, halt=9)])
@pytest.mark.parametrize("stand", [False, True])
def test_follower_never_proposes_nor_ends_the_job(said: Bulletin | None, stand: bool) -> None:
    for view in (followed(said), replace(followed(said), generation=None)):
        decision, reason = deciding.follow(view, own=OWN, stand=stand)
        assert not isinstance(decision, agree.Propose | agree.Finish)
        assert reason


def test_stand_ins_are_as_the_members_have_to_be() -> None:
    found = stand_ins(followed())
    assert list(found) == list(NAMES)
    assert {identity(each) for each in found.values()} == set(generation().nodes.values())
    assert {each.workers[0].state for each in found.values()} == {WorkerState.ACTIVE}
    assert {each.fenced for each in found.values()} == {2}
    over = stand_ins(followed(Bulletin(number=1, over=3)))
    assert {each.workers[0].state for each in over.values()} == {WorkerState.READY}
    assert {each.fenced for each in over.values()} == {3}
    view = following(followed(), OWN)
    assert view.nodes["c"] is OWN
    assert view.nodes["a"].sidecar == "sim://a/1"


def test_stand_ins_tell_the_stage_to_a_worker_that_starts() -> None:
    assert not following(followed(), OWN).roster().in_stages_after(0)
    record = generation()
    later = msgspec.structs.replace(
        record, snapshots=msgspec.structs.replace(record.snapshots, stage=1)
    )
    found = following(replace(followed(), generation=later), OWN).roster().in_stages_after(0)
    assert {worker.seat for worker in found} == {"trainer/0", "trainer/1", "trainer/3"}


def test_view_of_a_follower_takes_no_answer_about_other_records_over() -> None:
    whole = fakes.view(*records(fenced=3), generation=generation(), wanted={"trainer": 4})
    assert late_nodes(whole) == {}
    assert set(late_nodes(following(whole, OWN))) == set(NAMES)


# -- watching ----------------------------------------------------------------------------------


def test_follower_watches_when_it_is_concerned_itself() -> None:
    def why(
        view: JobView, own: NodeRecord = OWN, *, leaves: bool = False, waits: bool = False
    ) -> str:
        return deciding.must_watch(view, own=own, leaves=leaves, waits=waits)

    assert why(followed()) == ""
    assert why(replace(followed(), generation=None)) == ""
    assert "notice" in why(followed(), leaves=True)
    assert "stuck" in why(followed(), waits=True)
    assert "stuck" in why(followed(), msgspec.structs.replace(OWN, unreachable={"a": "a#1/1"}))
    assert "joins" in why(followed(), fakes.node("e", fakes.worker("trainer/4")))
    again = worker("c", WorkerState.STARTING, attempt=2)
    assert why(followed(), fakes.node("c", again)) == "trainer/2 joins"
    over = followed(Bulletin(number=1, over=3))
    assert why(over, fakes.node("c", again)) == "", "others may have started anew as well"
    assert why(followed(), fakes.node("c", worker("c", WorkerState.DEAD))) == ""
    assert "stuck" in why(followed(Bulletin(number=1, look_around=True)))
    assert "stage" in why(followed(Bulletin(number=1, stage=1)))
    roles = replace(followed(), wanted={"trainer": 4, "rollout": 2})
    assert "other roles" in why(roles)


def test_job_is_large_by_what_it_was_started_with_or_has_become() -> None:
    view = fakes.view(*records(), wanted={"trainer": 4})
    assert not deciding.is_crowd(view, expected=4, most=4)
    assert deciding.is_crowd(view, expected=5, most=4)
    assert deciding.is_crowd(view, expected=1, most=3)
    assert deciding.is_crowd(replace(view, bulletin=Bulletin(number=1)), expected=1, most=9)


# -- deciding ----------------------------------------------------------------------------------


def test_agents_try_to_take_a_free_place_one_after_the_other() -> None:
    view = followed(deciders={})
    free = deciding.FreePlaces(since={}).observe(view, now_s=10.0)
    due = {}
    for number in range(200):
        place, again_s = deciding.claim(
            view, free, node=f"n{number}", incarnation=f"n{number}#1", now_s=10.0, expected=1000
        )
        assert place is None or again_s is None
        due[number] = 10.0 if again_s is None else again_s
        later = deciding.claim(
            view, free, node=f"n{number}", incarnation="x", now_s=11.0, expected=1000
        )
        assert later[0] in range(deciding.PLACES)
    assert max(due.values()) <= 11.0
    at = sorted(due.values())
    assert all(after_s - before_s < 0.1 for before_s, after_s in pairwise(at))


def test_place_is_claimed_by_no_agent_that_holds_one_and_not_while_it_is_taken() -> None:
    view = watched(deciders={0: decider("a"), 2: decider("b")})
    free = deciding.FreePlaces(since={}).observe(view, now_s=0.0)
    assert set(free.since) == {1}
    mine = deciding.claim(view, free, node="a", incarnation="a#1", now_s=9.0, expected=4)
    assert mine == (None, None)
    other = deciding.claim(view, free, node="c", incarnation="c#1", now_s=9.0, expected=4)
    assert other == (1, None)
    assert deciding.turn_of(view, "b#1") == 1
    assert deciding.turn_of(view, "b#2") is None, "its predecessor held it"
    lost = view.without({"a"})
    assert deciding.turn_of(lost, "b#1") == 0, "its place stays taken until its lease has ended"


def test_decider_tells_what_it_does_and_no_more_than_once() -> None:
    view = watched()
    first = deciding.tell(view, fencing=0, halting=0, reason="")
    assert first == Bulletin(number=1)
    view = replace(view, bulletin=first)
    assert deciding.tell(view, fencing=0, halting=0, reason="") is None
    over = deciding.tell(view, fencing=3, halting=0, reason="node b was lost")
    assert over == Bulletin(number=2, over=3, reason="node b was lost")
    view = replace(view, bulletin=over)
    assert deciding.tell(view, fencing=3, halting=0, reason="other words") is None
    assert deciding.tell(view, fencing=1, halting=0, reason="") is None, "numbers only grow"


def test_where_deciders_are_only_they_propose() -> None:
    nodes = [
        fakes.node(name, fakes.worker(f"trainer/{n}", ready_after=3), fenced=3)
        for n, name in enumerate(NAMES)
    ]
    old = fakes.generation(3, nodes, ranks=[(each.node, each.workers[0]) for each in nodes])
    view = replace(
        fakes.view(*nodes[:3], generation=old, wanted={"trainer": 4}),
        deciders={1: decider("c"), 2: decider("b")},
    )
    seen = agree.observe(view, agree.FirstSeen(), now_s=0.0)
    assert agree.decide(view, seen, node="a", now_s=99.0)[1] == "the deciders propose"
    assert isinstance(agree.decide(view, seen, node="c", now_s=0.0)[0], agree.Propose)
    assert agree.decide(view, seen, node="b", now_s=0.0)[1] == "another node proposes first"
    assert isinstance(agree.decide(view, seen, node="b", now_s=1.0)[0], agree.Propose)


# -- the part of one agent -----------------------------------------------------------------------


def part(name: str = "c", *, expected: int = 4, most: int = 2) -> AgentPart:
    return AgentPart(name, incarnation=f"{name}#1", expected=expected, most=most)


def choose(mine: AgentPart, view: JobView, now_s: float, *, waits: bool = False) -> int | None:
    move, _ = mine.next_move(
        view, own=lambda: OWN, follows=True, leaves=False, waits=waits, now_s=now_s
    )
    assert not isinstance(move, Tell), "one that follows tells nothing"
    return move.place if isinstance(move, Claim) else None


def tell(mine: AgentPart, view: JobView, now_s: float) -> tuple[Bulletin | None, float | None]:
    move, again_s = mine.next_move(
        view, own=lambda: OWN, follows=False, leaves=False, waits=False, now_s=now_s
    )
    assert not isinstance(move, Claim)
    return (move.bulletin if move else None), again_s


def test_agents_of_a_small_job_watch_and_hold_no_place() -> None:
    mine = part(most=4)
    assert mine.watches
    assert choose(mine, fakes.view(*records(), wanted={"trainer": 4}), 5.0) is None
    assert mine.watches
    assert not mine.is_crowd


def test_follower_watches_while_it_is_stuck_and_a_little_longer() -> None:
    mine, view = part(), followed(deciders=dict(enumerate(map(decider, "abd"))))
    assert not mine.watches
    choose(mine, view, 10.0)
    assert not mine.watches
    choose(mine, view, 11.0, waits=True)
    assert mine.watches
    choose(mine, view, 12.0)
    assert mine.watches
    choose(mine, view, 13.5)
    assert not mine.watches


def test_agent_that_takes_a_place_watches_and_tells_after_the_ones_before_it() -> None:
    mine, view = part(), watched(deciders={0: decider("a")})
    assert choose(mine, view, 0.0) is None
    assert choose(mine, view, 9.0) in (1, 2)
    assert choose(mine, view, 9.01) is None, "one try at a time"
    assert not mine.watches
    view = replace(view, deciders={0: decider("a"), 1: decider("c")})
    choose(mine, view, 9.1)
    assert mine.watches
    assert mine.begin_fence(3, "because")
    assert tell(mine, view, 10.0) == (None, 10.0 + deciding.STAGGER_S)
    due, _ = tell(mine, view, 10.1)
    assert due == Bulletin(number=1, over=3, reason="because")
    assert tell(mine, view, 10.11)[0] is None
    assert tell(mine, replace(view, bulletin=due), 10.2) == (None, None)


def test_a_generation_is_fenced_once_and_for_the_first_reason() -> None:
    mine, view = part(), watched(deciders={0: decider("c")})
    assert mine.begin_fence(3, "because")
    assert not mine.begin_fence(3, "for another reason")
    assert not mine.begin_fence(2, "late")
    due, _ = tell(mine, view, 10.0)
    assert due == Bulletin(number=1, over=3, reason="because")


def test_a_decider_whose_view_is_still_that_of_a_follower_tells_nothing() -> None:
    mine, view = part(), watched(deciders={0: decider("c")})
    mine.begin_halt(3, "others join")
    assert choose(mine, view, 10.0) is None
    due, _ = tell(mine, view, 10.0)
    assert due == Bulletin(number=1, halt=3, reason="others join")


def test_trainers_that_stand_end_their_generation() -> None:
    mine, view = part(), followed(deciders={0: decider("a")})
    decision, _ = mine.decide(view, own=lambda: OWN, follows=True, now_s=0.0)
    assert isinstance(decision, agree.Idle)
    mine.standing = view.number
    decision, _ = mine.decide(view, own=lambda: OWN, follows=True, now_s=0.0)
    assert decision == agree.FenceWorkers(generation=view.number)


def test_agents_of_a_job_that_grew_watch_until_some_decide() -> None:
    mine = part(expected=1, most=3)
    grown = fakes.view(*records(), wanted={"trainer": 4}, generation=generation())
    for now_s in (0.0, 5.0):
        choose(mine, grown, now_s)
        assert mine.watches
    others = replace(grown, deciders=dict(enumerate(map(decider, "abd"))))
    choose(mine, others, 8.0)
    assert not mine.watches


def test_first_decider_speaks_for_all() -> None:
    view = watched(deciders={1: decider("b"), 2: decider("c")})
    assert [part(name).speaks(view) for name in "abc"] == [False, True, False]
    assert [part(name).decides(view) for name in "abc"] == [False, True, True]
    small = fakes.view(*records(), wanted={"trainer": 4})
    assert [part(name).speaks(small) for name in "abc"] == [True, False, False]
