"""State of one rank that a restore does not bring back as it was. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from holdfast.elastic.loop.trace.records import LeafDigest, StateSeen
from holdfast.tools.check.compare import Difference, TraceMoment
from holdfast.tools.check.traces import RankTrace

_Seat: TypeAlias = tuple[str, int, int, int]  # stage, number of ranks, rank, complete steps


def own_lost(traces: Sequence[RankTrace]) -> Difference | None:
    """Return the first value of a rank's own that is another after a restore than before it.

    ``traces`` are those of one run, in the order of their beginnings.
    """
    kept: dict[_Seat, tuple[int, dict[str, LeafDigest]]] = {}
    for trace in traces:
        entered = trace.entered
        for seen in trace.of(StateSeen):
            own = {name: leaf for name, leaf in seen.leaves.items() if leaf.kind == "own"}
            seat = (entered.stage, entered.world, entered.rank, seen.step + seen.after)
            if seen.after:
                kept[seat] = entered.generation, own
                continue
            for other, (generation, _) in list(kept.items()):
                undone = other[3] > seen.step and generation < entered.generation
                if other[0] == entered.stage and undone:
                    del kept[other]
            _, before = kept.get(seat, (0, {}))
            for name in own.keys() & before.keys():
                if own[name].digest != before[name].digest:
                    return Difference(
                        moment=TraceMoment(stage=0, step=seen.step, part=0),
                        what="own state",
                        names=(name,),
                        here=own[name].shown,
                        there=before[name].shown,
                        rank=entered.rank,
                        restored=True,
                    )
    return None
