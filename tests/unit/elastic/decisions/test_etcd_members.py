"""The next change of a managed etcd's members, case by case."""

from __future__ import annotations

import pytest

from holdfast.elastic.decisions.etcd_members import (
    PATIENCE_S,
    AddLearner,
    KeepMembers,
    MemberChange,
    MemberPlace,
    MemberState,
    PromoteLearner,
    RemoveMember,
    next_change,
    wanted_voters,
)


def voter(id: int, machine: str | None = None, *, silent_s: float = 0.0) -> MemberState:
    return MemberState(id=id, machine=machine or f"m{id}", silent_s=silent_s)


def learner(id: int, *, silent_s: float = 0.0) -> MemberState:
    return MemberState(id=id, machine=f"m{id}", learner=True, silent_s=silent_s)


def change(members: list[MemberState], *machines: int, leaving: int = 0) -> MemberChange:
    places = [MemberPlace(machine=f"m{i}", leaving=i == leaving) for i in machines]
    return next_change(members, places)[0]


@pytest.mark.parametrize(("machines", "voters"), [(1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (9, 5)])
def test_so_many_machines_want_so_many_voters(machines: int, voters: int) -> None:
    assert wanted_voters(machines) == voters


def test_one_member_becomes_three_by_way_of_learners() -> None:
    assert change([voter(1)], 1, 2) == KeepMembers(), "two voters are no safer than one"
    assert change([voter(1)], 1, 2, 3) == AddLearner(machine="m2")
    assert change([voter(1), learner(2, silent_s=1)], 1, 2, 3) == KeepMembers()
    assert change([voter(1), learner(2)], 1, 2, 3) == PromoteLearner(id=2)
    assert change([voter(1), voter(2)], 1, 2, 3) == AddLearner(machine="m3")
    assert change([voter(1), voter(2), voter(3)], 1, 2, 3, 4) == KeepMembers()


def test_five_machines_have_five_voters() -> None:
    three = [voter(1), voter(2), voter(3)]
    assert change(three, 1, 2, 3, 4, 5) == AddLearner(machine="m4")
    assert change([*three, voter(4)], 1, 2, 3, 4, 5) == AddLearner(machine="m5")


def test_two_silent_voters_of_five_give_up_their_places_to_nobody() -> None:
    late, early = PATIENCE_S, PATIENCE_S - 1
    three = [voter(1), voter(2), voter(3)]
    members = [*three, voter(4, silent_s=late), voter(5, silent_s=late)]
    assert change(members, 1, 2, 3) == RemoveMember(id=4), "one more loss would end the majority"
    assert change([*three, members[4]], 1, 2, 3) == RemoveMember(id=5)
    assert change([*three, voter(4), members[4]], 1, 2, 3, 4) == KeepMembers(), "no safer without"
    members[4] = voter(5, silent_s=early)
    assert change(members, 1, 2, 3) == KeepMembers(), "it may be back in a moment"


def test_a_silent_voter_gives_up_its_place_after_a_minute_to_a_free_machine() -> None:
    late, early = PATIENCE_S, PATIENCE_S - 1
    assert change([voter(1), voter(2), voter(3, silent_s=early)], 1, 2, 4) == KeepMembers()
    assert change([voter(1), voter(2), voter(3, silent_s=late)], 1, 2) == KeepMembers()
    assert change([voter(1), voter(2), voter(3, silent_s=late)], 1, 2, 4) == RemoveMember(id=3)


def test_a_machine_that_comes_back_without_its_data_takes_its_own_place() -> None:
    members = [voter(1), voter(2), voter(3, silent_s=PATIENCE_S)]
    assert change(members, 1, 2, 3) == RemoveMember(id=3)
    assert change(members[:2], 1, 2, 3) == AddLearner(machine="m3")


def test_without_a_majority_nothing_changes() -> None:
    late = PATIENCE_S
    assert change([voter(1), voter(2, silent_s=late)], 1, 3, 4) == KeepMembers()
    members = [voter(1), voter(2, silent_s=late), voter(3, silent_s=1)]
    assert change(members, 1, 4, 5) == KeepMembers()


def test_a_removal_needs_a_majority_of_the_rest() -> None:
    members = [voter(1), voter(2), voter(3), voter(4, silent_s=1), voter(5, silent_s=PATIENCE_S)]
    assert change(members, 1, 2, 3, 4, 6) == RemoveMember(id=5)
    assert change(members[:3], 1, 2, 3, leaving=3) == RemoveMember(id=3)
    assert change([voter(1), voter(3), voter(4, silent_s=1)], 1, 3, leaving=3) == KeepMembers()


def test_a_learner_that_dies_is_removed_first() -> None:
    members = [voter(1), voter(2), learner(3)]
    assert change(members, 1, 2, 4) == RemoveMember(id=3)
    members = [voter(1), voter(2), learner(3, silent_s=PATIENCE_S)]
    assert change(members, 1, 2, 3, 4) == RemoveMember(id=3)


def test_a_learner_too_many_is_removed() -> None:
    assert change([voter(1), learner(2)], 1, 2) == RemoveMember(id=2)


def test_the_number_is_odd_at_rest() -> None:
    assert change([voter(1), voter(2)], 1, 2) == RemoveMember(id=2)
    assert change([voter(1), voter(2)], 1) == RemoveMember(id=2)
    assert change([voter(i) for i in (1, 2, 3, 4)], 1, 2, 3, 4) == RemoveMember(id=4)
    members = [voter(1), voter(2), voter(3), voter(4, silent_s=1)]
    assert change(members, 1, 2, 3) == KeepMembers(), "it may be back in a moment"


def test_a_machine_that_leaves_hands_its_place_over() -> None:
    assert change([voter(1)], 1, 2, leaving=1) == AddLearner(machine="m2")
    assert change([voter(1), learner(2)], 1, 2, leaving=1) == PromoteLearner(id=2)
    assert change([voter(1), voter(2)], 1, 2, leaving=1) == RemoveMember(id=1)
    assert change([voter(1)], 1, leaving=1) == KeepMembers(), "nobody is there to take it"


def test_a_machine_has_one_member_at_most() -> None:
    assert change([voter(1), voter(2, "m1"), voter(3)], 1, 3) == KeepMembers()
    assert change([voter(1), voter(2)], 1, 1, 2, 2) == RemoveMember(id=2)
