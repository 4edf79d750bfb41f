"""The question whether a job can continue with the nodes that are left. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.elastic.membership.records import TRAINER


def hopeless(
    left: Mapping[str, Mapping[str, int]], lost: Mapping[str, str], *, needed: int
) -> str | None:
    """Return why the job cannot continue with the nodes ``left``, None if it can.

    ``left`` has each node's slots by role, ``lost`` the ending of each lost node; ``needed`` is the
    least number of trainers.
    """
    losses = ", ".join(f"{name} ({ending})" for name, ending in lost.items())
    if not left:
        return f"every node is lost: {losses}; look for the cause in their output"
    room = sum(slots.get(TRAINER, 0) for slots in left.values())
    if room < needed:
        return (
            f"{needed} trainers are needed and the nodes that are left have room for {room} "
            f"(lost: {losses}): give more nodes or slots, or allow fewer with "
            "Mesh(dp='auto', min_dp=...)"
        )
    return None
