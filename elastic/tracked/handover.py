"""Hand-over: all ranks halt at the end of a step for an announced change, so no step is repeated.

The steps are synchronous: if one rank stops at the end of a step, no rank completes the next. All
ranks learn from the gradients' own reduction that a node wishes the halt. They snapshot the step
and halt. If a node must leave, its ranks wait until the step is protected and report this to their
agent, which ends them and withdraws. From then on it is a lost node like any other, lost at a
moment that costs no work. If others want to join, the ranks report that they halt, and their agents
fence.
"""

from __future__ import annotations

import logging
import time
from enum import IntEnum

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.elastic.channel.base import Channel
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.groups.waits import POLL_S

_log = logging.getLogger(__name__)

HOLD_S = 60.0
"""Time limit of the halt, for a change that does not come after all."""

_ASK_S = 0.2


class Wish(IntEnum):
    """A rank's request to all ranks for the end of the step; of several, the largest counts."""

    NONE = 0
    HALT = 1
    LEAVE = 2


def wish_of(channel: Channel, world: GenerationWorld) -> Wish:
    """Return the request of this rank's agent."""
    if channel.leaving():
        return Wish.LEAVE
    return Wish.HALT if channel.halts(world.generation) else Wish.NONE


def hand_over(
    channel: Channel, world: GenerationWorld, client: SidecarClient, *, step: int, stored: bool
) -> None:
    """Halt at the end of ``step`` until the generation is over, at most `HOLD_S`.

    Every rank has a snapshot of the step. ``stored``: the step is being written to the store, and
    is safe once it is there. Raises ``GenerationOverError``.
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
    """Return whether ``step`` can be restored without this node; wait a moment for the answer.

    Without parity it can once the store has it; without a store waiting would not help.
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
