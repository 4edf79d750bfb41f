"""Section meeting: ranks of a generation meet, all with all or as a tree of circles.

Real ranks are small processes without a model: counted are their connections and the requests to
their meeting points, timed the formation and a short message of all. For larger worlds the counts
are computed, from the same circles and from what gloo does: a full mesh has a connection for
each pair, and each rank reads the keys of all, of 154 bytes and 8 a rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

import msgspec
from rich.console import Console

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.groups.circles import WorldScale, rings_of
from holdfast.tools.bench.crowd.processes import answer, process
from holdfast.tools.bench.crowd.ranks import RankCosts, RankPlan, serve
from holdfast.tools.bench.samples import BenchSetup, Figure, by_line

WORLDS: Final = (2, 8, 16, 32, 64)
QUICK_WORLDS: Final = (2, 8)
LARGE_NODES: Final = (10, 100, 1_000, 10_000)
NODE_RANKS: Final = 8
"""Ranks of a node; of a world that has fewer, half of them."""

_MESH: Final = WorldScale(many=1 << 30)
_TREE: Final = WorldScale(many=1)
_LIMIT_S: Final = 600.0
_RING_PAIRS: Final = 2
_KEY_BYTES: Final = 154
_PAIR_BYTES: Final = 8
_COLUMNS: Final = {
    "form": "formed",
    "message": "2 messages",
    "connections, formed": "linked",
    "connections, used": "after a sum",
    "most connections": "most",
    "requests": "requests",
    "most requests": "at a point",
    "read": "KiB",
    "hops": "hops",
}


def meeting(setup: BenchSetup, *, worlds: Sequence[int] | None = None) -> list[Figure]:
    """Measure every number of ranks, and compute the counts of larger ones."""
    found: list[Figure] = []
    for ranks in (QUICK_WORLDS if setup.quick else WORLDS) if worlds is None else worlds:
        for how, scale in (("mesh", _MESH), ("tree", _TREE)):
            setup.say(f"{ranks} ranks, {how}")
            costs = _measured(ranks, scale)
            found += _figures(f"{ranks} ranks, {how}", costs)
    for nodes in LARGE_NODES:
        found += _mesh_counts(nodes * NODE_RANKS)
        found += _tree_counts(nodes)
    for _ in range(setup.repeat + 1):
        setup.lap()
    return found


def _measured(ranks: int, scale: WorldScale) -> list[RankCosts]:
    key, node_ranks = RunKey.new(), min(NODE_RANKS, max(1, ranks // 2))
    with ExitStack() as stack:
        pipes = []
        for rank in range(ranks):
            plan = RankPlan(rank=rank, ranks=ranks, node_ranks=node_ranks, key=key, scale=scale)
            context = process(serve, plan, preload=[serve.__module__])
            pipes.append(stack.enter_context(context))
        stores = [answer(pipe, limit_s=_LIMIT_S) for pipe in pipes]
        for pipe in pipes:
            pipe.send(stores)
        return [msgspec.convert(answer(pipe, limit_s=_LIMIT_S), RankCosts) for pipe in pipes]


def _figures(name: str, costs: Sequence[RankCosts]) -> Iterator[Figure]:
    ranks = len(costs)
    used = [each.connections_used for each in costs]
    requests = [each.requests for each in costs]
    yield _figure(name, "form", [each.formed_s for each in costs], unit="s")
    yield _figure(name, "message", [each.said_s for each in costs], unit="s")
    formed = [each.connections_formed for each in costs]
    yield _figure(name, "connections, formed", [statistics.mean(formed)])
    yield _figure(name, "connections, used", [statistics.mean(used)])
    yield _figure(name, "most connections", [max(used)])
    yield _figure(name, "requests", [sum(requests) / ranks])
    yield _figure(name, "most requests", [max(requests)])
    read_bytes = sum(each.read_bytes for each in costs)
    yield _figure(name, "read", [read_bytes / ranks / 1024], unit="KiB")


def _mesh_counts(ranks: int) -> Iterator[Figure]:
    """Yield the counts of one group in which all connect with all."""
    name = f"{ranks:,} ranks, mesh, computed"
    yield _figure(name, "connections, used", [ranks - 1])
    yield _figure(name, "most connections", [ranks - 1])
    yield _figure(name, "requests", [2])
    yield _figure(name, "most requests", [2 * ranks])
    yield _figure(name, "read", [ranks * (_KEY_BYTES + _PAIR_BYTES * ranks) / 1024], unit="KiB")
    yield _figure(name, "hops", [2 * (ranks - 1)])


def _tree_counts(nodes: int) -> Iterator[Figure]:
    """Yield the counts of the tree, and of a ring of gradients beside it."""
    ranks = nodes * NODE_RANKS
    name = f"{ranks:,} ranks, tree, computed"
    where = [f"n{rank // NODE_RANKS}" for rank in range(ranks)]
    connections, asked, at_point, hops = [_RING_PAIRS] * ranks, [0] * ranks, [0] * ranks, 0
    read_bytes = 0
    for rank in range(ranks):  # its own key, and those of its two neighbours in the ring
        asked[rank] += 1 + _RING_PAIRS
        at_point[rank] += 1 + _RING_PAIRS
        read_bytes += _RING_PAIRS * _KEY_BYTES
    for ring in rings_of(where, fan_out=WorldScale().fan_out):
        largest = max(map(len, ring))
        if largest > 1:
            hops += 1 + (largest - 1).bit_length()  # all to the leader at once, and back by halves
        for circle in ring:
            size = len(circle)
            if size == 1:
                continue
            at_point[circle[0]] += 2 * size
            read_bytes += size * size * (_KEY_BYTES + _PAIR_BYTES * size)
            for rank in circle:
                connections[rank] += size - 1
                asked[rank] += 2
    yield _figure(name, "connections, used", [sum(connections) / ranks])
    yield _figure(name, "most connections", [max(connections)])
    yield _figure(name, "requests", [sum(asked) / ranks])
    yield _figure(name, "most requests", [max(at_point)])
    yield _figure(name, "read", [read_bytes / ranks / 1024], unit="KiB")
    yield _figure(name, "hops", [hops])


def _figure(name: str, what: str, values: Sequence[float], *, unit: str = "") -> Figure:
    return Figure(
        section="meeting",
        name=f"{name}: {what}",
        value=statistics.median(values),
        unit=unit,
        low=min(values),
        high=max(values),
    )


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print one line per number of ranks and way to meet."""
    console.print(by_line(figures, columns=_COLUMNS, cell=_cell))


def _cell(figure: Figure) -> str:
    if figure.unit == "s":
        return f"{figure.value * 1000:,.1f} ms" if figure.value < 1 else f"{figure.value:.2f} s"
    return f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:,.1f}"
