"""Choice of the nodes to leave out when nodes cannot reach each other. Pure.

A node's record has its agent's findings, with the identity of each probed node, so that a restarted
node is not blamed for its predecessor. A report of one of the two nodes is enough, because a
connection needs both directions.

The nodes left out touch every broken pair: they form a vertex cover, chosen by the greedy rule
(most pairs first). The smallest cover is hard to find, and a job loses more by a long computation
than by one more node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice

from holdfast.elastic.membership.incremental import by_nodes, once, while_same
from holdfast.elastic.membership.records import GenerationRecord, NodeRecord
from holdfast.elastic.membership.view import JobView, identity

Pairs = Mapping[str, Set[str]]
"""Node → the nodes with which it has a broken connection; symmetric."""

_NAMED = 8


@by_nodes()
def _complaints(nodes: Iterable[NodeRecord]) -> dict[str, Mapping[str, str]]:
    """Return each node's unreachable nodes, with their identities at the time of the probe."""
    return {node.node: node.unreachable for node in nodes if node.unreachable}


@once
def _has_complaints(view: JobView) -> bool:
    return bool(_complaints(view))


@by_nodes()
def _marks(nodes: Iterable[NodeRecord]) -> dict[str, str]:
    return {node.node: identity(node) for node in nodes}


@while_same(lambda view: (_complaints(view), _marks(view)))
def _pairs(complaints: Mapping[str, Mapping[str, str]], marks: Mapping[str, str]) -> Pairs:
    found: dict[str, set[str]] = {}
    for name, marked in complaints.items():
        for other, mark in marked.items():
            if other != name and marks.get(other) == mark:
                found.setdefault(name, set()).add(other)
                found.setdefault(other, set()).add(name)
    return found


@while_same(lambda view: (_pairs(view), _marks(view), view.generation))
def _inside(
    pairs: Pairs, marks: Mapping[str, str], generation: GenerationRecord | None
) -> Set[str]:
    """Return the nodes of broken pairs that are in the newest generation's group unchanged."""
    known = generation.nodes if generation else {}
    return {name for name in pairs if known.get(name) == marks[name]}


def parted(view: JobView) -> list[tuple[str, str]]:
    """Return broken pairs inside the newest generation's group, which cannot continue with them.

    The first few are enough. Nodes that were restarted since do not belong to the group.
    """
    return _parted(view) if _has_complaints(view) else []


@while_same(lambda view: (_pairs(view), _inside(view)))
def _parted(pairs: Pairs, inside: Set[str]) -> list[tuple[str, str]]:
    found = ((a, b) for a in sorted(inside) for b in sorted(pairs[a] & inside) if a < b)
    return list(islice(found, _NAMED + 1))


@while_same(lambda view: (view.generation,))
def _trainers(generation: GenerationRecord | None) -> Mapping[str, int]:
    """Return each node's number of members of the newest generation."""
    found: dict[str, int] = {}
    for member in generation.members if generation else ():
        found[member.node] = found.get(member.node, 0) + 1
    return found


def left_out(view: JobView) -> Mapping[str, list[str]]:
    """Return the nodes to leave out of the next generation, with those they do not reach.

    Of the newest generation's group the nodes in the most broken pairs are left out first, then
    those with fewer of its trainers, then the later name. A node outside the group never displaces
    one inside: it stays out as long as it is in a broken pair with a node that stays.
    """
    return _left_out(view) if _has_complaints(view) else {}


@while_same(lambda view: (_pairs(view), _inside(view), _trainers(view)))
def _left_out(
    pairs: Pairs, inside: Set[str], trainers: Mapping[str, int]
) -> Mapping[str, list[str]]:
    out = _cover(pairs, inside, gone=frozenset(), trainers=trainers)
    stay = inside - out
    outside = pairs.keys() - inside
    barred = {name for name in outside if pairs[name] & stay}
    out |= barred
    out |= _cover(pairs, outside - barred, gone=out, trainers=trainers)
    return {name: sorted(pairs[name]) for name in sorted(out)}


def _cover(
    pairs: Pairs, names: Set[str], *, gone: Set[str], trainers: Mapping[str, int]
) -> set[str]:
    """Return the names to leave out, so that no broken pair is left among the rest."""
    left = {name: len(pairs[name] & names) for name in names}
    counts = {name: len(pairs[name] - gone) for name in names}
    out: set[str] = set()
    while worst := [name for name, count in left.items() if count]:
        first = max(worst, key=lambda name: (counts[name], -trainers.get(name, 0), name))
        out.add(first)
        del left[first]
        for other in pairs[first] & left.keys():
            left[other] -= 1
            counts[other] -= 1
    return out


@by_nodes(lambda view: (view.generation,))
def _unasked(nodes: Iterable[NodeRecord], generation: GenerationRecord | None) -> dict[str, bool]:
    """Return the living nodes of the group that have not yet reported which nodes they reach."""
    if generation is None:
        return {}
    known, number = generation.nodes, generation.number
    return {node.node: True for node in nodes if node.probed < number and node.node in known}


def all_asked(view: JobView) -> bool:
    """Return whether every living node of the newest generation's group has reported its probes."""
    return not _unasked(view)


@by_nodes(lambda view: (view.generation,))
def _stalled(nodes: Iterable[NodeRecord], generation: GenerationRecord | None) -> dict[str, bool]:
    number = generation.number if generation else 0
    return {
        node.node: True for node in nodes if number > 0 and number in (node.stalled, node.standing)
    }


@once
def is_wondering(view: JobView) -> bool:
    """Return whether all nodes of the group should probe, because some node is stuck."""
    return bool(_stalled(view) or parted(view))


def clauses_of(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return broken pairs as clauses; of many, only the first few."""
    clauses = [f"node {a} and node {b} do not reach each other" for a, b in pairs[:_NAMED]]
    return clauses + ["and others"] * (len(pairs) > _NAMED)


def why_left_out(view: JobView) -> str:
    """Return the left-out nodes and those they do not reach, as one clause; empty for none."""
    return "; ".join(_each_left_out(left_out(view)))


def _each_left_out(out: Mapping[str, list[str]]) -> Iterator[str]:
    for name, others in islice(out.items(), _NAMED):
        few = ", ".join(others[:_NAMED]) + (" and others" if len(others) > _NAMED else "")
        yield f"{name} left out: it and {few} do not reach each other"
    if len(out) > _NAMED:
        yield f"{len(out) - _NAMED} more left out for the same reason"
