"""The decision of a launcher on the etcd member of its own machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from holdfast.elastic.coordinator.managed.listed import ListedMember


class OwnMember(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a member that lies on this machine; ``id`` is 0 while it is not known."""

    id: int = 0
    runs: bool = False


class OwnStep(Enum):
    """The next step of a launcher for its own member.

    BEGIN: start a new member, with empty data. AGAIN: start the member with the data that is there.
    DISCARD: end it and remove its data, because the cluster has removed it.
    """

    KEEP = "keep"
    BEGIN = "begin"
    AGAIN = "start again"
    DISCARD = "discard"


def own_step(
    own: OwnMember | None, listed: Sequence[ListedMember] | None, *, peer: str
) -> tuple[OwnStep, str]:
    """Return the next step, and the reason.

    ``own`` is None where no data is, ``listed`` None while no majority answers. A member that has
    started once is never begun anew: it would forget its votes. The cluster removes it instead.
    """
    if own is None:
        there = next((each for each in listed or () if each.peer == peer), None)
        if there is None:
            return OwnStep.KEEP, "the cluster lists no member here"
        if there.name:
            return OwnStep.KEEP, "the data of the member here is lost"
        return OwnStep.BEGIN, "the cluster lists a new member here"
    if listed is not None and not _is_listed(own, listed, peer=peer):
        return OwnStep.DISCARD, "the cluster has removed the member here"
    if not own.runs:
        return OwnStep.AGAIN, "the member here has ended"
    return OwnStep.KEEP, "the member here runs"


def _is_listed(own: OwnMember, listed: Sequence[ListedMember], *, peer: str) -> bool:
    if own.id:
        return any(each.id == own.id for each in listed)
    return any(each.peer == peer for each in listed)
