"""Check that a generation's restore point can be read from the sidecars' real contents.

The planner counts from inventories; this module counts from the sidecars themselves, fragment by
fragment, by rules of its own. If a node has changed since the view, its contents count as readable,
because the planner could not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.ckpt.memory.records import RestorePoint
from holdfast.ckpt.parity.stripes import Geometry
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.testing.simulation.sidecar import PAYLOAD_BYTES, SimulatedSidecar, block_entry


def unreadable(
    point: RestorePoint,
    *,
    view: JobView,
    sidecars: Mapping[str, SimulatedSidecar],
    payload_bytes: int = PAYLOAD_BYTES,
) -> str:
    """Return the missing part of a restore point that was planned from ``view``, or "".

    ``sidecars`` are those of the living nodes, with blocks of about ``payload_bytes``.
    """
    holdings = _Holdings(view, sidecars)
    key = (point.world.generation, point.step)
    ranks = [source.rank for source in point.sources]
    if ranks != list(range(len(point.world.rank_nodes))):
        return f"step {point.step} has sources for ranks {ranks}"
    entries = {rank: block_entry(key, rank, payload_bytes=payload_bytes) for rank in ranks}
    for source in point.sources:
        who = f"the block of rank {source.rank}"
        if source.node not in view.nodes:
            return f"{who} is asked of {source.node}, which is gone"
        if source.rebuilt:
            geometry = Geometry(point.world, entries)
            if found := _too_few(geometry, source.rank, point=point, holdings=holdings):
                return f"{who} cannot be rebuilt: {found}"
        elif not holdings.has_block(source.node, point, source.rank):
            return f"{who} is asked of {source.node}, which does not have it"
    return ""


def _too_few(geometry: Geometry, rank: int, *, point: RestorePoint, holdings: _Holdings) -> str:
    homes = point.world.rank_nodes
    for stripe, lost, lo, hi, _ in geometry.pieces_of_block(rank):
        k = geometry.columns(stripe)
        there = sum(
            all(
                holdings.has_block(homes[span.rank], point, span.rank)
                for span in geometry.spans(stripe, column, lo, hi)  # none: zeros, always known
            )
            for column in range(k)
            if column != lost
        )
        rows = (geometry.nodes[geometry.node_of(stripe, k + row)] for row in range(geometry.m))
        there += sum(holdings.has_row(node, point, (stripe, row)) for row, node in enumerate(rows))
        if there < k:
            return f"{there} of the {k} fragments of stripe {stripe} are left"
    return ""


class _Holdings:
    """The contents of the nodes of a view, as far as the nodes have not changed since."""

    def __init__(self, view: JobView, sidecars: Mapping[str, SimulatedSidecar]) -> None:
        self._view, self._sidecars = view, sidecars

    def has_block(self, node: str, point: RestorePoint, rank: int) -> bool:
        """Return whether the node has a rank's block."""
        key = (point.world.generation, point.step)
        return self._answer(node, lambda sidecar: sidecar.has_block(key, rank))

    def has_row(self, node: str, point: RestorePoint, place: tuple[int, int]) -> bool:
        """Return whether the node has a parity row."""
        key = (point.world.generation, point.step)
        return self._answer(node, lambda sidecar: sidecar.has_row(key, place))

    def _answer(self, node: str, has: Callable[[SimulatedSidecar], bool]) -> bool:
        if node not in self._view.nodes:
            return False
        sidecar = self._sidecars.get(node)
        if sidecar is None or not sidecar.alive or not sidecar.book.is_closed:
            return True
        return sidecar.book.generation != self._view.number or has(sidecar)
