"""The decision when a node with a notice to end may leave. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast.elastic.membership.view import JobView

RUSH_S = 3.0
"""Time before its end from which a node no longer waits for its turn."""

SETTLE_S = 0.3
"""Time that a node waits to see others that got a notice at the same time."""


LINGER_S = 2.0
"""Time that a node waits, after its notice, for workers of roles other than trainers.

They see the notice at once; workers that do not answer have nothing to hand over.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Continue as before: it is another node's turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Make the local trainers hand over at the end of their step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """End the workers, withdraw and exit."""


def place(view: JobView) -> int:
    """Return the place of a node with a new notice: after all known ones."""
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
    """Return the next action, and the reason, of a node with a notice ``since_s`` seconds old.

    The node must end in ``due_s``.

    ``handed`` are the incarnations of its trainers that have halted at the end of a step that is
    safe without them; ``others`` of its other workers still have to hand over. Nodes leave one
    after the other, by place and name: two at once could be more than the parity allows.
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
        return Stay(), "other nodes may have got notice at the same time"
    order = sorted((each.leaving, name) for name, each in view.nodes.items() if each.leaving)
    if order and order[0][1] != node and not rushed:
        return Stay(), f"node {order[0][1]} leaves first"
    if waiting := [each for each in mine if each not in handed]:
        return HandOver(), f"{len(waiting)} of {len(mine)} trainers have yet to hand over"
    return lingers or (Leave(), "every trainer has handed over")
