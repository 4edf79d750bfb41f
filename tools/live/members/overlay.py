"""A run's view with the roll of its coordinator over it. Pure.

Events tell times, causes and costs, the coordinator tells who is there now. If both tell of a node,
its lease decides whether it lives, and its own events say the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from holdfast.tools.live.members.roll import Roll
from holdfast.tools.live.view import CheckpointsView, NodeView, RunView, SeatView

_GONE: Final = ("lost", "left")
_OVER: Final = ("done", "failed")


def overlay(view: RunView, roll: Roll, *, heard: Iterable[str], since_s: float) -> RunView:
    """Return the view with the members that the coordinator holds.

    ``heard`` are the nodes that told events, ``since_s`` is the time from which the coordinator was
    read. ``unheard`` of the result names the nodes of which no events are there.
    """
    told = frozenset(heard)
    unheard = tuple(node.node for node in roll.nodes if node.node not in told)
    if view.ended_s is not None:
        return msgspec.structs.replace(view, source="both", unheard=unheard)
    is_newest = view.generation == roll.generation
    nodes = tuple(_nodes(view.nodes, roll, told if is_newest else frozenset()))
    if not view.counts:
        return _alone(view, roll, nodes=nodes, unheard=unheard, since_s=since_s)
    plans = {each.generation: each for each in (*roll.plans, *view.recoveries) if each.reason}
    plans |= {each.generation: each for each in view.recoveries if each.generation not in plans}
    recoveries = (plans[number] for number in sorted(plans, reverse=True))
    durable = max((node.durable or -1 for node in nodes), default=-1)
    checkpoints = view.checkpoints
    if durable > (-1 if checkpoints.durable_step is None else checkpoints.durable_step):
        checkpoints = msgspec.structs.replace(checkpoints, durable_step=durable, durable_s=None)
    elsewhere = view.state == "silent" or not roll.members <= told
    newer = roll.generation >= view.generation
    over = roll.state in _OVER
    return msgspec.structs.replace(
        view,
        nodes=nodes,
        source="both",
        unheard=unheard,
        state=roll.state if elsewhere or over else view.state,
        message=roll.message if over else view.message,
        ended_s=view.now_s if over else None,
        generation=roll.generation if newer else view.generation,
        world=roll.world if newer else view.world,
        wanted=view.wanted or roll.wanted,
        recoveries=tuple(recoveries),
        checkpoints=checkpoints,
        timed=view.timed and not unheard,
    )


def _alone(
    view: RunView,
    roll: Roll,
    *,
    nodes: tuple[NodeView, ...],
    unheard: tuple[str, ...],
    since_s: float,
) -> RunView:
    """Return the view of a run of which there are no events."""
    durable = max((node.durable for node in nodes if node.durable is not None), default=None)
    return msgspec.structs.replace(
        view,
        run=roll.run,
        source="coordinator",
        unheard=unheard,
        state=roll.state,
        message=roll.message,
        started_s=since_s,
        ended_s=view.now_s if roll.state in _OVER else None,
        generation=roll.generation,
        world=roll.world,
        wanted=roll.wanted,
        losses=sum(node.losses for node in nodes),
        nodes=nodes,
        recoveries=roll.plans,
        timed=False,
        checkpoints=CheckpointsView(durable_step=durable),
    )


def _nodes(found: tuple[NodeView, ...], roll: Roll, told: frozenset[str]) -> Iterator[NodeView]:
    """Yield the nodes of both, in the order of the first, then those that only the roll has."""
    rolled = {node.node: node for node in roll.nodes}
    for node in found:
        held = rolled.pop(node.node, None)
        yield node if held is None else _both(node, held, told)
    yield from rolled.values()


def _both(node: NodeView, held: NodeView, told: frozenset[str]) -> NodeView:
    is_gone, was_gone = held.state in _GONE, node.state in _GONE
    waits = held.state == "held off" and node.state == "spare"
    if node.node in told and is_gone == was_gone and not waits:
        return node
    known = {seat.seat: seat for seat in node.seats}
    if is_gone:
        held = msgspec.structs.replace(
            held,
            seats=tuple(
                msgspec.structs.replace(seat, alive=False, rank=None) for seat in node.seats
            ),
        )
    return msgspec.structs.replace(
        node,
        state=held.state,
        why=held.why,
        since_s=held.since_s,
        seats=tuple(_seat(known.get(seat.seat), seat) for seat in held.seats),
        losses=max(node.losses, held.losses),
        troubles=() if is_gone else tuple(dict.fromkeys((*node.troubles, *held.troubles))),
    )


def _seat(known: SeatView | None, held: SeatView) -> SeatView:
    """Return a worker with its place in the roll, and the figures that its own events told."""
    if known is None:
        return held
    return msgspec.structs.replace(
        known, pid=held.pid, attempt=held.attempt, alive=held.alive, rank=held.rank
    )
