"""A view cut into sections, so that a page gets only those that changed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from holdfast.tools.live.telling import partly
from holdfast.tools.live.view import Curve, NodeView, RunView

FULL_NODES: Final = 64
"""Up to this many nodes a page gets all there is to know of each, of more only the states."""

_RECOVERIES: Final = 60
_FAULTS: Final = 120
_MESSAGES: Final = 200
_CURVES: Final = 12

_HEAD: Final = (
    "run", "state", "message", "now_s", "started_s", "ended_s", "wall_s", "step", "generation",
    "world", "wanted", "step_s", "goodput", "shares", "steps_lost", "lost_s", "recoveries_s",
    "losses", "damaged", "source", "timed",
)  # fmt: skip

_encode: Final = msgspec.json.Encoder(decimal_format="number").encode


def sections(view: RunView, *, extra: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the JSON of each section; a node is the section ``node/NAME``.

    ``extra`` goes into the head.
    """
    head = {name: getattr(view, name) for name in _HEAD}
    head |= {"events": sum(view.counts.values()), "partial": partly(view)}
    yield "head", _encode({**head, **extra})
    yield "protection", _encode(view.protection)
    yield "checkpoints", _encode(view.checkpoints)
    yield "recoveries", _encode(view.recoveries[:_RECOVERIES])
    yield "faults", _encode(view.faults[:_FAULTS])
    yield "stragglers", _encode(view.stragglers)
    yield "messages", _encode(view.messages[:_MESSAGES])
    yield "rollouts", _encode(view.rollouts)
    yield "island", _encode(view.island)
    full = len(view.nodes) <= FULL_NODES
    for node in view.nodes:
        yield f"node/{node.node}", _encode(node if full else slim(node))
    yield "progress", _encode(_points(view.progress))
    yield "steps", _encode([_points(view.step_times), _points(view.stalls)])
    yield "curves", _encode([_points(each) for each in view.curves[:_CURVES]])


def slim(node: NodeView) -> dict[str, Any]:
    """Return a node without what changes with every step."""
    ranks = sorted(each.rank for each in node.seats if each.rank is not None)
    return {
        "node": node.node,
        "state": node.state,
        "why": node.why,
        "since_s": node.since_s,
        "losses": node.losses,
        "troubles": node.troubles[:1],
        "ranks": [ranks[0], ranks[-1]] if ranks else [],
        "workers": sum(each.alive for each in node.seats),
        "answered": node.answered,
    }


def _points(curve: Curve) -> dict[str, Any]:
    """Return a curve in the fewest bytes: no more digits than a screen shows."""
    return {
        "name": curve.name,
        "width": curve.width,
        "points": [
            [_round(each.at), _round(each.mean), _round(each.least), _round(each.most)]
            for each in curve.points
        ],
    }


def _round(value: float) -> float:
    return float(f"{value:.10g}") if abs(value) >= 1e6 else float(f"{value:.5g}")
