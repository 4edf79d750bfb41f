"""Variables of the script that a restore does not bring back. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.elastic.loop.trace.records import CarriedSeen
from holdfast.tools.check.compare import Difference, TraceMoment
from holdfast.tools.check.traces import RankTrace


class CarriedVariables:
    """The variables that the script carries from step to step, as undisturbed runs showed them."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, int, str], set[str]] = {}

    def add(self, traces: Sequence[RankTrace]) -> None:
        """Learn the values in generations that began at the first step; nothing was lost there."""
        for trace in traces:
            if trace.entered.generation > 1 or trace.entered.completed:
                continue
            for seen in trace.of(CarriedSeen):
                for name, text in seen.values.items():
                    self._texts.setdefault((trace.entered.stage, seen.step, name), set()).add(text)

    def lost(self, traces: Sequence[RankTrace]) -> Difference | None:
        """Return the first variable that is the run's own and that a restore did not bring back.

        It is the run's own if it had the same value on all ranks in all runs before any restore,
        and another one at another step.
        """
        for trace, seen in _first_after_restore(traces):
            for name, here in seen.values.items():
                there = self.expected(trace.entered.stage, seen.step, name)
                if there is not None and here != there and self._moves(trace.entered.stage, name):
                    return Difference(
                        moment=TraceMoment(stage=0, step=seen.step, part=5),
                        what="carried",
                        names=(name,),
                        here=here,
                        there=there,
                        rank=trace.entered.rank,
                        restored=True,
                    )
        return None

    def changed(self, traces: Sequence[RankTrace], *, step: int) -> list[tuple[str, str, str]]:
        """Return variables that are not as expected at ``step``: name, value, expected value.

        The first step's are listed first, since nothing but the script has touched them.
        """
        found: dict[str, tuple[str, str, str]] = {}
        for trace in traces:
            restored = trace.entered.completed
            for seen in trace.of(CarriedSeen):
                if seen.step not in (0, restored) or seen.step > step:
                    continue
                for name, here in seen.values.items():
                    there = self.expected(trace.entered.stage, seen.step, name)
                    if there is not None and here != there:
                        found.setdefault(name, (name, here, there))
        return sorted(found.values(), key=lambda item: item[1].startswith("#"))

    def expected(self, stage: str, step: int, name: str) -> str | None:
        """Return the value of a variable if all undisturbed runs agree on one."""
        texts = self._texts.get((stage, step, name), set())
        return next(iter(texts)) if len(texts) == 1 else None

    def _moves(self, stage: str, name: str) -> bool:
        texts = [found for (of, _, n), found in self._texts.items() if (of, n) == (stage, name)]
        return len(set().union(*texts)) > 1 and all(len(found) == 1 for found in texts)


def _first_after_restore(traces: Sequence[RankTrace]) -> Iterator[tuple[RankTrace, CarriedSeen]]:
    for trace in traces:
        entered = trace.entered
        for seen in trace.of(CarriedSeen):
            if seen.step == entered.completed > 0:
                yield trace, seen
