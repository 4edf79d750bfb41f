"""Standing at the end of a step, for a change of the world that was announced: it undoes nothing.

The steps are synchronous, so where one rank stops at the end of a step nobody completes the next.
All ranks learn from the gradients' own reduction that some node wishes it, snapshot the step, and
stand still. Where a node is to leave, its ranks see the step protected and say so to their agent,
which ends them and withdraws: from there on it is a lost node like any other, at the best of
moments. Where others want to join, the ranks say that they stand, and their agents fence.
"""

from __future__ import annotations

import logging
import time
from enum import IntEnum

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.elastic.channel.base import Channel
from holdfast.elastic.groups.collectives import POLL_S
from holdfast.elastic.groups.reform import GenerationWorld

_log = logging.getLogger(__name__)

HOLD_S = 60.0
"""How long all stand still for a change that does not come after all."""

_ASK_S = 0.2


class Wish(IntEnum):
    """What a rank has all ranks do at the end of the step; where several wish, the largest."""

    NONE = 0
    HALT = 1
    LEAVE = 2


def wish_of(channel: Channel, world: GenerationWorld) -> Wish:
    """Return what this rank's agent asks for."""
    if channel.leaving():
        return Wish.LEAVE
    return Wish.HALT if channel.halts(world.generation) else Wish.NONE


def hand_over(
    channel: Channel, world: GenerationWorld, client: SidecarClient, *, step: int, stored: bool
) -> None:
    """Stand at the end of ``step`` until the generation is over, at most `HOLD_S`.

    Every rank has a snapshot of it. ``stored``: it was given to the store, and is safe when it is
    there. Raises ``GenerationOverError``.
    """
    deadline_s, halted, handed = time.monotonic() + HOLD_S, False, False
    with world.guard.wait():
        while time.monotonic() < deadline_s:
            world.guard.check()
            if not halted and channel.halts(world.generation):
                channel.halted(generation=world.generation, step=step)
                halted = True
            if handed or not channel.leaving():
                time.sleep(POLL_S)
            elif _is_safe(world, client, step=step, stored=stored):
                channel.handed_over(generation=world.generation, step=step)
                handed = True
    _log.warning("the world has not changed after %g s: going on", HOLD_S)


def _is_safe(world: GenerationWorld, client: SidecarClient, *, step: int, stored: bool) -> bool:
    """Ask for a moment whether ``step`` can be restored without this node.

    Without parity it can when the store has it; where there is none, waiting would not help.
    """
    parity = world.record.snapshots.parity
    try:
        if parity:
            reached = client.protected_step(
                generation=world.generation, at_least=step, timeout_s=_ASK_S
            )
            return reached >= step
        return not stored or client.durable_step(at_least=step, timeout_s=_ASK_S) >= step
    except CkptError as error:
        _log.warning("step %d cannot be handed over: %s", step, error)
        time.sleep(_ASK_S)
        return False
