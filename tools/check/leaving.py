"""Ranks of one generation that leave the loop at different steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.elastic.loop.trace.records import CarriedSeen, LoopLeft, MicrobatchSeen
from holdfast.tools.check.compare import Difference, TraceMoment
from holdfast.tools.check.traces import RankTrace


def left_alone(traces: Sequence[RankTrace]) -> Difference | None:
    """Return that a rank left the loop at a step from which another rank went on."""
    groups: dict[tuple[str, int], list[RankTrace]] = {}
    for trace in traces:
        groups.setdefault((trace.entered.stage, trace.entered.generation), []).append(trace)
    for group in groups.values():
        left = {t.entered.rank: t.of(LoopLeft)[-1].step for t in group if t.of(LoopLeft)}
        for rank, step in sorted(left.items(), key=lambda item: (item[1], item[0])):
            for trace in group:
                other = trace.entered.rank
                if left.get(other, _reached(trace)) > step - (other not in left):
                    return Difference(
                        moment=TraceMoment(stage=0, step=step, part=4),
                        what="left",
                        names=(str(rank), str(other)),
                        rank=rank,
                    )
    return None


def _reached(trace: RankTrace) -> int:
    """Return the last step that a rank began."""
    steps = [r.step for r in trace.records if isinstance(r, MicrobatchSeen | CarriedSeen)]
    return max(steps, default=-1)
