"""The decision on the next change of a managed etcd's members. Pure.

There are one, three or five voters at rest, each on a machine of its own. A new member comes in as
a learner, which has no vote, and gets one when it answers; etcd itself refuses that until it has
the data. Changes go one at a time, and each leaves a majority of voters that answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

PATIENCE_S: Final = 60.0
"""Silence after which a member gives up its place."""

_SIZES: Final = ((5, 5), (3, 3))
"""Machines of the job, and the voters that so many machines have at least; else one."""


class MemberState(msgspec.Struct, frozen=True, kw_only=True):
    """A member as the cluster lists it; ``silent_s`` is 0 if it answers."""

    id: int
    machine: str
    learner: bool = False
    silent_s: float = 0.0


class MemberPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A machine whose launcher lives and can run a member; not for long if it is ``leaving``."""

    machine: str
    leaving: bool = False


class KeepMembers(msgspec.Struct, frozen=True, kw_only=True):
    """No change now."""


class AddLearner(msgspec.Struct, frozen=True, kw_only=True):
    """List a new member on a machine, without a vote."""

    machine: str


class PromoteLearner(msgspec.Struct, frozen=True, kw_only=True):
    """Give the learner a vote."""

    id: int


class RemoveMember(msgspec.Struct, frozen=True, kw_only=True):
    """Take a member off the list."""

    id: int


MemberChange: TypeAlias = KeepMembers | AddLearner | PromoteLearner | RemoveMember


def next_change(
    members: Sequence[MemberState], places: Sequence[MemberPlace]
) -> tuple[MemberChange, str]:
    """Return the next change of the members, and the reason."""
    voters = [member for member in members if not member.learner]
    if not _decides(voters):
        return KeepMembers(), "no majority of the voters answers"
    staying = sorted({place.machine for place in places if not place.leaving})
    leaving = {place.machine for place in places} - {*staying}
    if learner := next((member for member in members if member.learner), None):
        return _learner(learner, voters, staying, leaving=leaving)
    free = [each for each in staying if each not in {member.machine for member in members}]
    return _voters(voters, staying, free=free, leaving=leaving)


def wanted_voters(machines: int) -> int:
    """Return the number of voters for a job of so many machines."""
    return next((voters for least, voters in _SIZES if machines >= least), 1)


def _learner(
    learner: MemberState,
    voters: Sequence[MemberState],
    staying: Sequence[str],
    *,
    leaving: set[str],
) -> tuple[MemberChange, str]:
    if learner.machine not in staying:
        return RemoveMember(id=learner.id), "the learner's machine is gone"
    if learner.silent_s >= PATIENCE_S:
        return RemoveMember(id=learner.id), "the learner is silent"
    handed_over = any(voter.machine in leaving for voter in voters)
    if len(voters) >= wanted_voters(len(staying)) and len(voters) % 2 and not handed_over:
        return RemoveMember(id=learner.id), "there are enough voters without the learner"
    if learner.silent_s > 0:
        return KeepMembers(), "the learner does not answer yet"
    return PromoteLearner(id=learner.id), "the learner answers"


def _voters(
    voters: Sequence[MemberState],
    staying: Sequence[str],
    *,
    free: Sequence[str],
    leaving: set[str],
) -> tuple[MemberChange, str]:
    goes = [voter for voter in voters if voter.machine in leaving]
    if goes and staying:
        if change := _without(goes, voters):
            return change, "its machine leaves the job"
        if free and len(voters) == 1:
            return AddLearner(machine=free[0]), "the only voter's machine leaves the job"
    silent = sorted(
        (voter for voter in voters if voter.silent_s >= PATIENCE_S),
        key=lambda voter: (-voter.silent_s, voter.id),
    )
    back = [voter for voter in silent if voter.machine in staying]  # without its data
    replaced = silent if free else back
    if change := _without(replaced, voters):
        return change, "it is silent, and a machine can take its place"
    if len(silent) > 1 and (change := _without(silent, voters)):
        return change, "two are silent, and without them one more may be lost"
    if not silent and len(voters) < wanted_voters(len(staying)) and len(free) > len(voters) % 2:
        return AddLearner(machine=free[0]), "there are fewer voters than machines allow"
    if len(voters) % 2 == 0:
        if free and not silent:
            return AddLearner(machine=free[0]), "the number of voters is even"
        if silent or all(not voter.silent_s for voter in voters):
            surplus = silent or sorted(voters, key=lambda voter: -voter.id)
            if change := _without(surplus, voters):
                return change, "the number of voters is even, and no machine is free"
    return KeepMembers(), "the members are as they should be"


def _without(goes: Sequence[MemberState], voters: Sequence[MemberState]) -> RemoveMember | None:
    """Return the removal of the first that the others can do without."""
    for voter in goes:
        if _decides([other for other in voters if other.id != voter.id]):
            return RemoveMember(id=voter.id)
    return None


def _decides(voters: Sequence[MemberState]) -> bool:
    """Return whether a majority of these voters answers."""
    return 2 * sum(not voter.silent_s for voter in voters) > len(voters)
