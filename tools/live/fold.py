"""The fold: events of a run and answers of its nodes to a `RunView`, in bounded memory. Pure.

The same events give the same counts whatever their order, as the files of several nodes are read
one after the other. Series are down-sampled, of generations, faults and messages the newest stay;
the older ones are in the sums.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from holdfast.elastic.events import (
    Event,
    GenerationProposed,
    JobEnded,
    JobStarted,
    MetricsLogged,
    RankReformed,
    RoleMoved,
    StateRestored,
    StepDone,
    StepProtected,
    TokensSampled,
    TrainingHeld,
)
from holdfast.elastic.membership.view import role_of
from holdfast.tools.live.checkpointing import Checkpointing
from holdfast.tools.live.crews import Crews
from holdfast.tools.live.generations import Chapter, Ledgered, ledger
from holdfast.tools.live.newest import Newest
from holdfast.tools.live.protecting import Protecting
from holdfast.tools.live.sampling import Sampling
from holdfast.tools.live.seas import SeaPart
from holdfast.tools.live.series import Series
from holdfast.tools.live.telling import message_of
from holdfast.tools.live.troubles import Troubles
from holdfast.tools.live.view import (
    Curve,
    JobState,
    Point,
    RunMessage,
    RunView,
)
from holdfast.tools.report.accounting import useful
from holdfast.tools.show.node_status import NodeStatus

MOST_CHAPTERS: Final = 256
_FOLDED_AT_ONCE: Final = 64
_MOST_NEWS: Final = 300
_MOST_ROUTINE: Final = 100
"""Kept apart from the others, as there may be a checkpoint a minute for weeks."""

_MOST_CURVES: Final = 24
_UNLED: Final = 32
"""Steps of other ranks in a generation without one of rank 0: its events are elsewhere."""

_SILENT_S: Final = 120.0
"""Seconds without any event or answer after which a job counts as silent."""


class Fold:
    """The state of one run, folded from its events. `view` makes a value of it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.step, self.generation, self.last_s = 0, 0, 0.0
        self._started: JobStarted | None = None
        self._ended: JobEnded | None = None
        self._begun_s, self._last_start_s = math.inf, 0.0
        self._crews, self._checkpoints = Crews(), Checkpointing()
        self._sampling, self._island = Sampling(), SeaPart()
        self._chapters: dict[int, Chapter] = {}
        self._before: Chapter | None = None
        self._folded_to, self._past, self._past_from_s = 0, _NOTHING, math.nan
        self._troubles, self._protecting = Troubles(), Protecting()
        self._messages = Newest[RunMessage](_MOST_NEWS)
        self._routine = Newest[RunMessage](_MOST_ROUTINE)
        self._recent_s: deque[float] = deque(maxlen=32)
        self._held_s = 0.0
        self._wanted: dict[str, int] = {}
        self._led, self._unled = 0, (0, 0)
        self._reward: tuple[int, float | None] = (-1, None)
        self._progress, self._step_times, self._stalls = Series(), Series(), Series()
        self._curves: dict[str, Series] = {}

    def apply(self, events: Iterable[Event]) -> None:
        """Take over events, in any order."""
        for event in events:
            self.counts[event.kind] += 1
            if isinstance(event, StepDone):
                self._step(event)
            else:
                self._apply(event)
            self.last_s = max(self.last_s, event.time_s)
            self._begun_s = min(self._begun_s, event.time_s)

    def _step(self, event: StepDone) -> None:
        self._crews.step(event)
        self.step = max(self.step, event.step)
        if event.rank:
            number, count = self._unled
            self._unled = (number, count + 1) if event.generation == number else self._unled
            if event.generation > max(number, self._led):
                self._unled = event.generation, 1
            return
        self._led = max(self._led, event.generation)
        self._chapter(event.generation).step(event)
        self._progress.add(event.time_s, float(event.step))
        self._step_times.add(event.time_s, event.seconds)
        self._stalls.add(event.time_s, event.stall_s)
        self._recent_s.append(event.seconds)
        self._protecting.step(event)

    def _apply(self, event: Event) -> None:
        match event:  # those that come with every step
            case MetricsLogged(step=step, values=values):
                return self._log(step, values)
            case StepProtected():
                return self._protecting.protected(event)
            case TokensSampled():
                return self._sampling.apply(event)
        return self._seldom(event)

    def _seldom(self, event: Event) -> None:
        self._crews.apply(event)
        self._troubles.apply(event)
        self._checkpoints.apply(event)
        self._sampling.apply(event)
        self._island.apply(event)
        if (message := message_of(event)) is not None:
            of_level = self._routine if message.level == "routine" else self._messages
            of_level.add(event.time_s, message)
        match event:
            case GenerationProposed(generation=number):
                self.generation = max(self.generation, number)
                self._chapter(number).propose(event)
            case RankReformed(generation=number):
                self._chapter(number).reform(event)
            case StateRestored(generation=number):
                self._chapter(number).restore(event)
            case _:
                self._rare(event)

    def _rare(self, event: Event) -> None:
        match event:
            case JobStarted():
                if self._started is None or event.time_s < self._started.time_s:
                    self._started = event
                self._last_start_s = max(self._last_start_s, event.time_s)
                self._wanted = dict(event.wanted) or self._wanted
            case JobEnded():
                if self._ended is None or event.time_s > self._ended.time_s:
                    self._ended = event
            case RoleMoved(was=was, becomes=becomes):
                for seat, change in ((was, -1), (becomes, 1)):
                    self._wanted[role_of(seat)] = self._wanted.get(role_of(seat), 0) + change
            case TrainingHeld(seconds=seconds):
                self._held_s += seconds

    def _log(self, step: int, values: Mapping[str, float | None]) -> None:
        if (reward := values.get("reward")) is not None and step >= self._reward[0]:
            self._reward = step, reward
        for name, value in values.items():
            if name not in self._curves and len(self._curves) >= _MOST_CURVES:
                continue
            if value is not None:
                self._curves.setdefault(name, Series()).add(float(step), value)

    def _chapter(self, number: int) -> Chapter:
        if (found := self._chapters.get(number)) is not None:
            return found
        if number <= self._folded_to:
            return Chapter(number)  # its time is in the sums
        found = self._chapters[number] = Chapter(number)
        if len(self._chapters) > MOST_CHAPTERS + _FOLDED_AT_ONCE:
            self._fold_old()
        return found

    def _fold_old(self) -> None:
        """Put the oldest generations into the sums."""
        old = [self._chapters.pop(each) for each in sorted(self._chapters)[:_FOLDED_AT_ONCE]]
        rest = [self._chapters[each] for each in sorted(self._chapters)]
        until_s = min(each.start_s for each in rest)
        part = self._ledger(old, after=rest, until_s=until_s, is_over=False)
        self._past = _sum(self._past, part)
        self._past_from_s, self._folded_to = until_s, old[-1].number
        self._before = next((each for each in reversed(old) if each.count), self._before)

    def _ledger(
        self,
        chapters: list[Chapter],
        *,
        until_s: float,
        is_over: bool,
        after: Sequence[Chapter] = (),
    ) -> Ledgered:
        begin_s = self._began_s if math.isnan(self._past_from_s) else self._past_from_s
        return ledger(
            chapters,
            begin_s=begin_s,
            end_s=max(until_s, begin_s),
            disturbances=self._troubles.disturbances(),
            before=self._before,
            after=after,
            is_over=is_over,
        )

    @property
    def _began_s(self) -> float:
        if self._started is not None:
            return self._started.time_s
        return self._begun_s if math.isfinite(self._begun_s) else 0.0

    # -- view ------------------------------------------------------------------------------------

    def view(
        self,
        *,
        now_s: float,
        statuses: Mapping[str, NodeStatus] | None = None,
        damaged: int = 0,
    ) -> RunView:
        """Return the run as it is at ``now_s``, or as it was when it ended.

        ``statuses`` are the nodes' answers, ``damaged`` counts lines that are no events.
        """
        answers = statuses or {}
        ended = self._ended if self._is_over else None
        chapters = [self._chapters[number] for number in sorted(self._chapters)]
        newest = chapters[-1] if chapters else None
        state = self._state(newest, answers, now_s=now_s)
        until_s = ended.time_s if ended else max(now_s, self._began_s)
        if state == "silent":
            until_s = self.last_s
        told = _sum(self._past, self._ledger(chapters, until_s=until_s, is_over=ended is not None))
        shares = self._with_waits(told.shares)
        nodes = self._crews.nodes(
            answers,
            rollouts=self._sampling.seats(),
            is_over=ended is not None,
        )
        alive = {seat.seat for node in nodes for seat in node.seats if seat.alive}
        step = self.step or max((node.committed or 0 for node in nodes), default=0)
        return RunView(
            run=self._started.run if self._started else "",
            state=state,
            message=ended.message if ended else "",
            now_s=until_s,
            started_s=self._began_s or None,
            ended_s=ended.time_s if ended else None,
            wall_s=until_s - self._began_s if self._began_s else 0.0,
            step=step,
            generation=self.generation,
            world=len(newest.ranks) if newest else 0,
            wanted=self._wanted,
            step_s=statistics.median(self._recent_s) if self._recent_s else None,
            goodput=useful(shares),
            shares=shares,
            steps_lost=told.steps_lost,
            lost_s=told.lost_s,
            recoveries_s=shares.get("recovery", 0.0) + shares.get("join", 0.0),
            losses=self._troubles.losses,
            protection=self._protecting.view(nodes, answers, step=step, now_s=until_s),
            checkpoints=self._checkpoints.view(),
            nodes=nodes,
            recoveries=tuple(reversed(told.recoveries)),
            faults=self._troubles.fault_views(),
            stragglers=self._troubles.straggler_views(),
            messages=self._told(),
            rollouts=self._sampling.view(step=self.step, alive=alive, reward=self._reward[1]),
            island=self._island.view(),
            progress=_curve("step", self._progress),
            step_times=_curve("step seconds", self._step_times),
            stalls=_curve("stall seconds", self._stalls),
            curves=tuple(_curve(name, self._curves[name]) for name in sorted(self._curves)),
            counts=dict(sorted(self.counts.items())),
            damaged=damaged,
            timed=self._unled[0] <= self._led or self._unled[1] < _UNLED,
        )

    def heard(self) -> frozenset[str]:
        """Return the nodes that told events of their own."""
        return self._crews.heard()

    @property
    def _is_over(self) -> bool:
        """True if the job ended and was not started again since."""
        return self._ended is not None and self._ended.time_s >= self._last_start_s

    def _state(
        self, newest: Chapter | None, answers: Mapping[str, NodeStatus], *, now_s: float
    ) -> JobState:
        if self._is_over and self._ended is not None:
            return "done" if self._ended.ok else "failed"
        heard = any(node.status for node in answers.values())
        if not heard and now_s - self.last_s > _SILENT_S:
            return "silent"
        if newest is None or not (newest.count or any(c.count for c in self._chapters.values())):
            return "starting"
        stopped_s = self._troubles.stopped_s()
        return "training" if newest.count and stopped_s <= newest.ended_s else "recovering"

    def _with_waits(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Take the time of waiting, which lies within steps, from the productive time."""
        found = dict(shares)
        waits = {
            "waiting for rollouts": self._sampling.waited_s,
            "held by the demo": self._held_s,
        }
        for name, seconds in waits.items():
            taken_s = min(seconds, found.get("productive", 0.0))
            found[name] = found.get(name, 0.0) + taken_s
            found["productive"] = found.get("productive", 0.0) - taken_s
        return found

    def _told(self) -> tuple[RunMessage, ...]:
        """Return the messages, the newest first."""
        both = [*self._messages.in_order(), *self._routine.in_order()]
        return tuple(sorted(both, key=lambda message: -message.at_s))


_NOTHING: Final = Ledgered(shares={}, recoveries=(), steps_lost=0, lost_s=0.0)


def _sum(past: Ledgered, part: Ledgered) -> Ledgered:
    names = dict.fromkeys([*past.shares, *part.shares])
    return Ledgered(
        shares={each: past.shares.get(each, 0.0) + part.shares.get(each, 0.0) for each in names},
        recoveries=(past.recoveries + part.recoveries)[-MOST_CHAPTERS:],
        steps_lost=past.steps_lost + part.steps_lost,
        lost_s=past.lost_s + part.lost_s,
    )


def _curve(name: str, series: Series) -> Curve:
    return Curve(
        name=name,
        width=series.width,
        points=tuple(
            Point(at=at, mean=found.mean, least=found.least, most=found.most, count=found.count)
            for at, found in series.items()
        ),
    )
