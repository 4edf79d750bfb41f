"""A launcher's next step for the etcd member of its own machine."""

from __future__ import annotations

from holdfast.elastic.coordinator.managed.listed import ListedMember
from holdfast.elastic.decisions.own_member import OwnMember, OwnStep, own_step

PEER = "a:2"
OTHER = ListedMember(id=9, name="b", peer="b:2", client="b:1")
NAMED = ListedMember(id=1, name="a", peer=PEER, client="a:1")
FRESH = ListedMember(id=2, peer=PEER, learner=True)


def step(own: OwnMember | None, *listed: ListedMember, reached: bool = True) -> OwnStep:
    return own_step(own, listed if reached else None, peer=PEER)[0]


def test_a_member_begins_once_it_is_listed_and_only_then() -> None:
    assert step(None, OTHER) is OwnStep.KEEP
    assert step(None, OTHER, FRESH) is OwnStep.BEGIN
    assert step(None, reached=False) is OwnStep.KEEP


def test_a_member_that_lost_its_data_is_not_begun_anew_under_its_old_number() -> None:
    assert step(None, OTHER, NAMED) is OwnStep.KEEP


def test_a_member_that_ended_starts_again_also_while_no_majority_answers() -> None:
    assert step(OwnMember(id=1), OTHER, NAMED) is OwnStep.AGAIN
    assert step(OwnMember(id=1), reached=False) is OwnStep.AGAIN
    assert step(OwnMember(), OTHER, NAMED) is OwnStep.AGAIN
    assert step(OwnMember(id=1, runs=True), OTHER, NAMED) is OwnStep.KEEP
    assert step(OwnMember(id=1, runs=True), reached=False) is OwnStep.KEEP


def test_the_data_of_a_member_that_was_removed_goes() -> None:
    assert step(OwnMember(id=1, runs=True), OTHER) is OwnStep.DISCARD
    assert step(OwnMember(id=1), OTHER, FRESH) is OwnStep.DISCARD, "it is listed anew"
    assert step(OwnMember(), OTHER) is OwnStep.DISCARD
