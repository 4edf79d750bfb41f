"""When a node that was told to end may do so. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast.elastic.membership.view import JobView

RUSH_S = 3.0
"""So long before its end a node no longer waits for its turn."""

SETTLE_S = 0.3
"""So long a node waits to hear of others that were told at the same time."""


LINGER_S = 2.0
"""So long a node waits, after it was told, for workers of other roles than trainers.

They hear of it at once; those that do not answer have nothing to hand over.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Go on as before: it is another's turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Have the local trainers hand over at the end of their step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """End the workers, withdraw and exit."""


def place(view: JobView) -> int:
    """Return the place of a node that was just told to end: behind all that are known."""
    return 1 + max((each.leaving for each in view.nodes.values()), default=0)


def depart(
    view: JobView,
    *,
    node: str,
    handed: Collection[str],
    since_s: float,
    due_s: float,
    others: int = 0,
) -> tuple[Stay | HandOver | Leave, str]:
    """Return what a node does now, and why, that was told so ``since_s`` seconds ago.

    It is to end in ``due_s``.

    ``handed`` are the incarnations of its trainers that stand at the end of a step that is safe
    without them; ``others`` of its other workers have yet to hand over. Nodes leave one after the
    other, by place and name: two at once could be more than the parity allows.
    """
    if due_s <= 0:
        return Leave(), "the time is up"
    record = view.generation
    members = record.members if record else ()
    rushed = due_s <= RUSH_S
    lingers: tuple[Stay, str] | None = None
    if others and since_s < LINGER_S and not rushed:
        lingers = Stay(), f"{others} workers that do not train have yet to hand over"
    mine = [member.incarnation for member in members if member.node == node]
    if not mine:
        return lingers or (Leave(), "no worker of the node trains")
    if since_s < SETTLE_S and not rushed:
        return Stay(), "others may have been told at the same time"
    order = sorted((each.leaving, name) for name, each in view.nodes.items() if each.leaving)
    if order and order[0][1] != node and not rushed:
        return Stay(), f"node {order[0][1]} leaves first"
    if waiting := [each for each in mine if each not in handed]:
        return HandOver(), f"{len(waiting)} of {len(mine)} trainers have yet to hand over"
    return lingers or (Leave(), "every trainer has handed over")
