"""Hypothesis strategies for every view that the coordinator could show, however unlikely."""

from __future__ import annotations

from hypothesis import strategies as st

from doubles import fakes
from holdfast.ckpt.memory.records import Inventory
from holdfast.elastic.membership.records import (
    GenerationRecord,
    NodeRecord,
    Seating,
    WorkerRecord,
    WorkerState,
)
from holdfast.elastic.membership.view import JobView

NODES = ("a", "b", "c", "d", "e")
ROLES = ("trainer", "rollout")
_MAX_SEATS = 6
_NUMBER = 3


def seats() -> st.SearchStrategy[str]:
    """Return names of seats."""
    return st.builds(
        lambda role, number: f"{role}/{number}",
        st.sampled_from(ROLES),
        st.integers(0, _MAX_SEATS - 1),
    )


def _trainer(node: str, number: int) -> WorkerRecord:
    seat = f"trainer/{number}"
    return fakes.worker(seat, incarnation=f"{node}/{seat}@1", ready_after=_NUMBER)


def workers(node: str) -> st.SearchStrategy[WorkerRecord]:
    """Return a node's workers in any state."""
    return st.builds(
        lambda seat, state, attempt, after: fakes.worker(
            seat,
            state,
            incarnation=f"{node}/{seat}@{attempt}",
            attempt=attempt,
            ready_after=after,
        ),
        seats(),
        st.sampled_from(WorkerState),
        st.integers(1, 3),
        st.integers(0, _NUMBER),
    )


@st.composite
def seatings(draw: st.DrawFn) -> tuple[Seating, ...]:
    """Draw a seating; its nodes may be unknown, or none."""
    names = draw(st.sets(seats(), max_size=6))
    return tuple(
        Seating(
            seat=name,
            node=draw(st.sampled_from((*NODES, ""))),
            attempt=draw(st.integers(1, 3)),
            failures=draw(st.integers(0, 3)),
            progress=draw(st.integers(-1, 3)),
        )
        for name in sorted(names)
    )


@st.composite
def generations(draw: st.DrawFn) -> GenerationRecord:
    """Draw a newest generation: its group, and members on some of its nodes."""
    group = draw(st.lists(st.sampled_from(NODES), unique=True, min_size=1))
    numbers = draw(st.lists(st.integers(0, 5), unique=True, min_size=1, max_size=5))
    homes = [draw(st.sampled_from(group)) for _ in numbers]
    ranks = [(node, _trainer(node, n)) for node, n in zip(homes, numbers, strict=True)]
    nodes = [fakes.node(name) for name in sorted(group)]
    return fakes.generation(_NUMBER, nodes, ranks=ranks, parity=draw(st.integers(0, 2)))


@st.composite
def views(draw: st.DrawFn, *, plannable: bool = False, cuts: bool = False) -> JobView:
    """Draw a view: before the first generation or later, with nodes added, lost and changed.

    In a ``plannable`` view most nodes have fenced, and a READY trainer is likely. With ``cuts``
    some nodes do not reach each other.
    """
    generation = draw(st.none() | generations())
    world = generation.snapshots if generation else None
    peers = {peer.node for peer in world.peers} if world else set()
    nodes: list[NodeRecord] = []
    for name in draw(st.lists(st.sampled_from(NODES), unique=True)):
        found: Inventory | None = None
        if world and name in peers and draw(st.booleans()):
            found = fakes.inventory(name, world, *draw(st.sets(st.integers(0, 3))))
        locals_ = draw(st.lists(workers(name), max_size=4, unique_by=lambda w: w.seat))
        if plannable and name not in draw(st.sets(st.sampled_from(NODES), max_size=1)):
            parked = _trainer(name, draw(st.integers(0, 5)))
            locals_ = [parked, *(w for w in locals_ if w.seat != parked.seat)]
            fenced = _NUMBER if generation else 0
        else:
            fenced = draw(st.integers(0, _NUMBER)) if generation else 0
        nodes.append(
            fakes.node(
                name,
                *locals_,
                fenced=fenced,
                inventory=found,
                slots={role: draw(st.integers(0, 3)) for role in ROLES},
                sidecar=draw(st.sampled_from((True, True, True, False))),
                sidecar_starts=draw(st.sampled_from((1, 1, 2))),
                unreachable=draw(st.sets(st.sampled_from(NODES), max_size=2)) if cuts else (),
            )
        )
    return fakes.view(
        *nodes,
        generation=generation,
        seating=draw(seatings()),
        wanted={role: draw(st.integers(0, 4)) for role in ROLES},
    )
