"""Leaving on notice: the last step that a node takes part in is safe before it goes.

The steps are synchronous, so where one rank stops at the end of a step nobody completes the next.
All ranks learn from the gradients' own reduction that a node is to leave, snapshot the step, and
stand still; the leaving node's ranks see it protected and say so to their agent, which ends them
and withdraws. From there on it is a lost node like any other, at the best of moments.
"""

from __future__ import annotations

import logging
import time

from ckpt.errors import CkptError
from ckpt.sidecar.client import SidecarClient
from elastic.channel import Channel
from elastic.collectives import POLL_S
from elastic.reform import World

_log = logging.getLogger(__name__)

HOLD_S = 60.0
"""How long the others stand still for a node that does not leave after all."""

_ASK_S = 0.2


def hand_over(
    channel: Channel, world: World, client: SidecarClient, *, step: int, stored: bool
) -> None:
    """Stand at the end of ``step`` until the generation is over, at most `HOLD_S`.

    ``stored``: the step was given to the store, and is safe when it is there. Raises ``Fenced``.
    """
    deadline_s, said = time.monotonic() + HOLD_S, not channel.leaving()
    with world.guard.wait():
        while time.monotonic() < deadline_s:
            world.guard.check()
            if not said and _is_safe(world, client, step=step, stored=stored):
                channel.handed_over(generation=world.generation, step=step)
                said = True
            elif said:
                time.sleep(POLL_S)
    _log.warning("the node that was to leave is still there after %g s: going on", HOLD_S)


def _is_safe(world: World, client: SidecarClient, *, step: int, stored: bool) -> bool:
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
