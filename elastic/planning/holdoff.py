"""Hold-off of nodes that come and go: the count of losses, and the wait that follows. Pure.

A node's losses are part of the generation record, so they outlive the agent that wrote them. Every
agent measures the wait from the time when it first saw the node itself. A node that announced its
leaving is not lost but moved, which is no setback. A node that is left out because others do not
reach it has a setback: an unstable link is held off like an unstable node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from holdfast.elastic.membership.incremental import by_nodes, once
from holdfast.elastic.membership.readiness import lost_nodes, unmatched_nodes
from holdfast.elastic.membership.records import GenerationRecord, NodeRecord, Setback
from holdfast.elastic.membership.view import JobView, identity
from holdfast.elastic.planning.reach import left_out

MAX_SETBACKS = 1024

_NEVER = Setback(losses=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldoffPatience:
    """The number of losses before a node has to wait, and the waits, in seconds.

    After ``free_losses`` losses it waits ``first_s``, and twice as long each time after, up to
    ``most_s``. For every ``forgive_s`` without trouble one loss is forgiven.
    """

    free_losses: int = 3
    first_s: float = 1.0
    most_s: float = 60.0
    forgive_s: float = 600.0

    def wait_s(self, setback: Setback | None) -> float:
        """Return the wait of a node that comes back."""
        times = 0 if setback is None else setback.losses - self.free_losses
        return min(self.first_s * 2.0 ** min(times - 1, 60), self.most_s) if times > 0 else 0.0


@by_nodes()
def _leaving(nodes: Iterable[NodeRecord]) -> dict[str, str]:
    return {node.node: identity(node) for node in nodes if node.leaving}


def announced(view: JobView, before: Mapping[str, str]) -> dict[str, str]:
    """Return the newest generation's nodes that announced to leave, with their identities.

    ``before`` is the result for the previous view: nodes that have left by now are only known
    there.
    """
    inside = view.generation.nodes if view.generation else {}
    records = {**before, **_leaving(view)}
    return {name: mark for name, mark in records.items() if inside.get(name) == mark}


def setbacks_after(
    view: JobView, *, lived_s: float, patience: HoldoffPatience, leavers: Collection[str] = ()
) -> dict[str, Setback]:
    """Return the setbacks of lost nodes for the next generation's record.

    The newest generation lived for ``lived_s``; the loss of its ``leavers`` does not count. At most
    `MAX_SETBACKS` nodes are kept: those that were lost most often.
    """
    old = view.generation
    if old is None:
        return {}
    found: dict[str, Setback] = {}
    lost = {*lost_nodes(view), *(name for name in strangers(view) if name in old.nodes)}
    lost |= left_out(view).keys() & old.nodes.keys()
    for name in {*lost, *old.setbacks}:
        before = old.setbacks.get(name, _NEVER)
        if name not in old.nodes or (name in lost and name in leavers):
            after = before  # held off, away or moved: unchanged
        elif name in lost:
            after = Setback(losses=before.losses + 1)
        else:
            after = _forgiven(before, lived_s, patience)
        if after.losses > 0:
            found[name] = after
    if len(found) <= MAX_SETBACKS:
        return dict(sorted(found.items()))
    worst = sorted(found, key=lambda name: (-found[name].losses, name))[:MAX_SETBACKS]
    return {name: found[name] for name in sorted(worst)}


def _forgiven(before: Setback, lived_s: float, patience: HoldoffPatience) -> Setback:
    forgotten, calm_s = divmod(before.calm_s + lived_s, patience.forgive_s)
    return Setback(losses=before.losses - int(forgotten), calm_s=calm_s)


@once
def strangers(view: JobView) -> dict[str, str]:
    """Return the live nodes with an identity unknown to the newest generation, with marks.

    A restarted node is one as well; its mark changes with every start.
    """
    known = view.generation.nodes if view.generation else {}
    marks = {name: identity(node) for name, node in unmatched_nodes(view).items()}
    return {n: f"node:{n}:{mark}" for n, mark in marks.items() if mark != known.get(n)}


def held_off(
    view: JobView,
    since: Mapping[str, float],
    *,
    now_s: float,
    patience: HoldoffPatience,
    leavers: Collection[str] = (),
) -> dict[str, float]:
    """Return the nodes that are not admitted yet, and until when.

    ``since`` maps the marks of `strangers` to the times when they were first seen; ``leavers`` is
    as in `setbacks_after`.
    """
    if view.generation is None or not view.generation.setbacks:
        return {}
    delayed: dict[str, float] = {}
    for name, mark in strangers(view).items():
        losses = _setback(view.generation, name, leavers)
        until_s = since.get(mark, now_s) + patience.wait_s(losses)
        if now_s < until_s:
            delayed[name] = until_s
    return delayed


def why_held_off(view: JobView, name: str, *, patience: HoldoffPatience | None = None) -> str:
    """Return why a node that came back has to wait before it is let in, empty if it has not to.

    It holds until the next generation, which has the node or still has not: the view has no times.
    """
    if view.generation is None or not view.generation.setbacks or name not in strangers(view):
        return ""
    setback = _setback(view.generation, name)
    wait_s = (patience or HoldoffPatience()).wait_s(setback)
    if setback is None or not wait_s:
        return ""
    return f"it was lost {setback.losses} times, and waits {wait_s:g} s before it is let in"


def _setback(
    generation: GenerationRecord, name: str, leavers: Collection[str] = ()
) -> Setback | None:
    """Return the setback of a node with an identity that the generation does not know."""
    found = generation.setbacks.get(name)
    if name in generation.nodes and name not in leavers:  # just lost, and back
        return Setback(losses=1 + (found.losses if found else 0))
    return found
