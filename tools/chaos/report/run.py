"""One run as the report shows it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.tools.chaos.judging.checker import HistoryVerdict
from holdfast.tools.chaos.judging.record import History, Told
from holdfast.tools.chaos.judging.result import Result, Struck
from holdfast.tools.chaos.report.losses import Loss, Prediction, losses
from holdfast.tools.chaos.report.story import tell, tells_generations
from holdfast.tools.chaos.scenarios.catalogue import World
from holdfast.tools.report.timeline import Recovery, Timeline


class ReportedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run, or a history without one; ``unknown`` lists in words the missing reports.

    For a history that no scenario struck, ``world`` and ``seed`` are None, and ``struck`` is empty.
    ``recoveries`` are those of ``timeline``. ``losses`` are the sets of nodes that were lost at
    once, with their memory, and the outcome of each.
    """

    name: str
    folder: str
    world: World | None
    seed: int | None
    held: bool
    seconds: float
    verdict: HistoryVerdict
    struck: tuple[Struck, ...]
    problems: tuple[str, ...]
    replay: str
    recoveries: tuple[Recovery, ...]
    shares: dict[str, float]
    losses: tuple[Loss, ...]
    unknown: tuple[str, ...]
    generations: bool
    timeline: Timeline | None = None

    @property
    def hits(self) -> int:
        """Number of strikes that hit something."""
        if not self.struck:
            return len(self.timeline.faults) if self.timeline else 0
        return len(self.struck) - self.missed

    @property
    def missed(self) -> int:
        """Number of strikes that found nothing to hit."""
        return sum(each.missed for each in self.struck)

    @property
    def label(self) -> str:
        """Name of the run, with its seed if it has one."""
        return self.name if self.seed is None else f"{self.name}, seed {self.seed}"


def judged(
    events: Sequence[Told],
    history: History,
    verdict: HistoryVerdict,
    *,
    folder: str,
    result: Result | None = None,
    prediction: Prediction | None = None,
) -> ReportedRun:
    """Return a run from its reports; ``result`` is None for a mere history.

    ``prediction`` is the predicted outcome for the nodes that it loses, if there is one.
    """
    story = tell(events, struck=result.struck if result else None)
    generations = tells_generations(events)
    rows = story.recoveries if story else ()
    held = result.held if result else verdict.held
    return ReportedRun(
        name=result.name if result else folder,
        folder=folder,
        world=result.world if result else None,
        seed=result.seed if result else None,
        held=held,
        seconds=result.seconds if result else story.wall_s if story else 0.0,
        verdict=verdict,
        struck=result.struck if result else (),
        problems=result.problems if result else (),
        replay=result.replay if result else "",
        recoveries=tuple(row for row in rows if row.total_s is not None),
        shares=story.shares if story else {},
        losses=losses(story, events, held=held, prediction=prediction) if story else (),
        generations=generations,
        unknown=_unknown(history, story, generations=generations),
        timeline=story,
    )


def _unknown(history: History, story: Timeline | None, *, generations: bool) -> tuple[str, ...]:
    missing = {
        "any step": not history.commits,
        "generations, and the phases of recoveries": not generations,
        "the trained samples": not history.consumed,
        "the state after each step": not history.states,
        "the injected faults": story is None or not story.faults,
    }
    return tuple(words for words, absent in missing.items() if absent)
