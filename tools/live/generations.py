"""The generations of a run: their steps, and the time that changes of membership cost. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from holdfast.elastic.events import (
    Detected,
    FaultInjected,
    GenerationProposed,
    RankReformed,
    StateRestored,
    StepDone,
)
from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of
from holdfast.tools.live.view import RecoveryView
from holdfast.tools.report.accounting import Interval, account

_ENDS: Final = 32
"""The first and the last steps of a generation whose times are kept each."""

_TIERS: Final = ("none", "arena", "prefetched", "peer", "parity", "disk", "checkpoint")
"""Sources of a restore, the nearest first; of a generation the farthest one is told."""

Step: TypeAlias = tuple[int, float, float]
"""A step's number, its end in seconds since 1970, and its seconds."""


@dataclass(slots=True)
class Chapter:
    """A generation as its events told it, by rank 0 where all ranks tell the same."""

    number: int
    proposed_s: float = math.inf
    ranks: tuple[str, ...] = ()
    reason: str = ""
    restore_step: int | None = None
    restore_how: str = ""
    reformed_s: float = -math.inf
    restored_s: float = -math.inf
    restored_ranks: set[int] = field(default_factory=set)
    restored_bytes: int = 0
    tier: str = "none"
    checkpoint_step: int | None = None
    count: int = 0
    sum_s: float = 0.0
    first: int = 0
    last: int = -1
    began_s: float = math.inf
    ended_s: float = -math.inf
    head: list[tuple[int, Step]] = field(default_factory=list)
    tail: list[tuple[int, Step]] = field(default_factory=list)

    @property
    def start_s(self) -> float:
        """The time of the proposal, or of the first step where no proposal was seen."""
        return self.proposed_s if math.isfinite(self.proposed_s) else self.began_s

    @property
    def trains_s(self) -> float:
        """The time from which all ranks had their state; infinite before that."""
        if math.isfinite(self.restored_s):
            return max(self.restored_s, self.start_s)
        return self.began_s

    def propose(self, event: GenerationProposed) -> None:
        """Take over the proposal; the first one counts."""
        if event.time_s < self.proposed_s:
            self.proposed_s, self.ranks, self.reason = event.time_s, event.ranks, event.reason
            self.restore_step, self.restore_how = event.restore_step, event.restore_how

    def restore(self, event: StateRestored) -> None:
        """Take over the restore of a rank."""
        self.restored_s = max(self.restored_s, event.time_s)
        self.restored_ranks.add(event.rank)
        self.restored_bytes += event.bytes
        known = event.tier in _TIERS
        if known and _TIERS.index(event.tier) > _TIERS.index(self.tier):
            self.tier = event.tier
        if event.tier == "checkpoint":
            self.checkpoint_step = max(event.step, self.checkpoint_step or 0)

    def reform(self, event: RankReformed) -> None:
        """Take over that a rank is in its process groups."""
        self.reformed_s = max(self.reformed_s, event.time_s)

    def step(self, event: StepDone) -> None:
        """Take over a step of rank 0."""
        end_s = event.began_s + event.seconds
        done = (event.step, end_s, event.seconds)
        self.first = min(self.first, event.step) if self.count else event.step
        self.last = max(self.last, event.step)
        self.count += 1
        self.sum_s += event.seconds
        self.began_s, self.ended_s = min(self.began_s, event.began_s), max(self.ended_s, end_s)
        for ends, key in ((self.head, -event.step), (self.tail, event.step)):
            (heapq.heappush if len(ends) < _ENDS else heapq.heappushpop)(ends, (key, done))

    def seconds_from(self, step: int, *, to: int) -> float:
        """Return the seconds of the steps ``step`` to ``to``, from the mean for those not kept."""
        wanted = min(to, self.last) - max(step, self.first) + 1
        if wanted <= 0:
            return 0.0
        known = [each[2] for _, each in self.tail if step <= each[0] <= to]
        return sum(known) + max(wanted - len(known), 0) * self.sum_s / self.count

    def when(self, step: int) -> float | None:
        """Return the time at which a step was complete; None before that."""
        if not self.count or step > self.last:
            return None
        for _, (number, end_s, _) in (*self.head, *self.tail):
            if number == step:
                return end_s
        if step < self.first:
            return self.began_s
        return self.began_s + (self.ended_s - self.began_s) * (step - self.first + 1) / self.count


def of_trainers(victim: str) -> bool:
    """Say whether a seat or node of this name matters to the training: not a rollout worker."""
    return "/" not in victim or role_of(victim) in (TRAINER, "sidecar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbances:
    """Losses, joins and notices, faults that were injected, and the times of roll-backs."""

    detections: Sequence[Detected] = ()
    faults: Sequence[FaultInjected] = ()
    rollbacks: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledgered:
    """Seconds by class, recoveries by generation, and the steps that were executed again."""

    shares: dict[str, float]
    recoveries: tuple[RecoveryView, ...]
    steps_lost: int
    lost_s: float


def ledger(
    chapters: Sequence[Chapter],
    *,
    begin_s: float,
    end_s: float,
    disturbances: Disturbances,
    before: Chapter | None = None,
    after: Sequence[Chapter] = (),
    is_over: bool = False,
) -> Ledgered:
    """Account for the time from ``begin_s`` to ``end_s``, and describe each generation.

    ``chapters`` are in the order of their numbers; ``before`` is the last one with a step that came
    earlier, ``after`` are those that came later: their time is not accounted for. A generation that
    completed no step is part of the recovery that the next one ends.
    """
    stepped = [each for each in chapters if each.count]
    around = [*([before] if before else []), *stepped, *(each for each in after if each.count)]
    lost = _lost_seconds(around)
    recoveries: list[RecoveryView] = []
    claims: list[Interval] = []
    since_s, attempts = before.start_s if before else -math.inf, list[Chapter]()
    begins = before is None
    for chapter in chapters:
        attempts.append(chapter)
        if not chapter.count and chapter is not chapters[-1]:
            continue
        told = _Causes(disturbances, after_s=since_s, until_s=chapter.start_s)
        view = told.recovery(chapter, before, first=attempts[0])
        recoveries.append(view)
        claims += _claims(view, chapter, before, lost, begin_s=begin_s, end_s=end_s)
        since_s, attempts = chapter.start_s, []
        before = chapter if chapter.count else before
    if begins:
        first_s = min((each.began_s for each in stepped), default=end_s)
        claims.append(Interval("startup", 0.0, first_s - begin_s))
    if is_over:
        last_s = max((each.ended_s for each in stepped), default=begin_s)
        claims.append(Interval("shutdown", last_s - begin_s, end_s - begin_s))
    return Ledgered(
        shares=account(max(end_s - begin_s, 0.0), claims),
        recoveries=tuple(recoveries),
        steps_lost=sum(view.steps_lost for view in recoveries),
        lost_s=sum(lost.get(each.number, 0.0) for each in stepped),
    )


def _lost_seconds(stepped: Iterable[Chapter]) -> dict[int, float]:
    """Return for each generation the seconds of its steps that a later one executed again."""
    lost: dict[int, float] = {}
    standing: list[tuple[Chapter, int]] = []  # a generation, and its last step that stands
    for chapter in stepped:
        while standing and standing[-1][1] >= chapter.first:
            earlier, last = standing.pop()
            redone_s = earlier.seconds_from(chapter.first, to=last)
            lost[earlier.number] = lost.get(earlier.number, 0.0) + redone_s
            if earlier.first < chapter.first:
                standing.append((earlier, chapter.first - 1))
                break
        standing.append((chapter, chapter.last))
    return lost


class _Causes:
    """The losses, joins and roll-backs between two generations."""

    def __init__(
        self,
        disturbances: Disturbances,
        *,
        after_s: float,
        until_s: float,
    ) -> None:
        found = [
            each
            for each in disturbances.detections
            if after_s < each.time_s <= until_s and of_trainers(each.victim)
        ]
        self.losses = [each for each in found if each.what != "join"]
        self.joins = [each for each in found if each.what == "join"]
        self.faults = [
            each
            for each in disturbances.faults
            if after_s < each.time_s <= until_s and of_trainers(each.victim)
        ]
        self.rolled_back = [each for each in disturbances.rollbacks if after_s < each <= until_s]

    def recovery(self, chapter: Chapter, before: Chapter | None, *, first: Chapter) -> RecoveryView:
        """Return the view of a generation; ``first`` is the first attempt at it."""
        start_s = chapter.start_s
        cause = self._cause(before)
        found = self.losses or self.joins
        seen_s = min((each.time_s for each in found), default=first.start_s)
        hurt_s = min((each.time_s for each in self.faults), default=seen_s)
        at_s = min(hurt_s, seen_s) if self.losses else seen_s
        if cause in ("join", "start"):
            at_s = seen_s = first.start_s
        reached = before.last if before else None
        caught_up_s = self._caught_up(chapter, reached)
        trains_s = chapter.trains_s if math.isfinite(chapter.trains_s) else None
        reformed_s = max(chapter.reformed_s, start_s)
        if trains_s is None and not math.isfinite(chapter.reformed_s):
            reform_s = None
        else:
            reform_s = min(reformed_s, trains_s or reformed_s) - start_s
        restore_s = None if trains_s is None else max(trains_s - reformed_s, 0.0)
        point = chapter.restore_step if chapter.restore_step is not None else None
        return RecoveryView(
            generation=chapter.number,
            cause=cause,
            victims=tuple(dict.fromkeys(each.victim for each in found)),
            causes=tuple(dict.fromkeys(each.what for each in found)),
            at_s=at_s,
            proposed_s=start_s,
            ranks=len(chapter.ranks),
            restore_step=chapter.checkpoint_step if point is None else point,
            restore_how=chapter.restore_how,
            tier=chapter.tier,
            restored_bytes=chapter.restored_bytes,
            detect_s=seen_s - at_s if self.faults and self.losses else None,
            agree_s=start_s - seen_s,
            reform_s=reform_s,
            restore_s=restore_s,
            reexecute_s=(
                None if caught_up_s is None or trains_s is None else caught_up_s - trains_s
            ),
            total_s=None if caught_up_s is None else caught_up_s - at_s,
            steps_lost=(
                max(reached - chapter.first + 1, 0) if reached is not None and chapter.count else 0
            ),
            over=caught_up_s is not None,
            reason=chapter.reason,
        )

    def _cause(self, before: Chapter | None) -> str:
        if self.losses:
            return "loss"
        if self.rolled_back:
            return "rollback"
        if before is None:
            return "start"
        return "join" if self.joins else "change"

    def _caught_up(self, chapter: Chapter, reached: int | None) -> float | None:
        """Return the time at which training stands where it stood; None before that."""
        if not chapter.count:
            return None
        if reached is None or reached < chapter.first:
            return chapter.trains_s
        at_s = chapter.when(reached)
        return None if at_s is None else max(at_s, chapter.trains_s)


def _claims(
    view: RecoveryView,
    chapter: Chapter,
    before: Chapter | None,
    lost: dict[int, float],
    *,
    begin_s: float,
    end_s: float,
) -> list[Interval]:
    """Return the claims of a generation to wall time, in seconds since ``begin_s``."""
    trains_s = min(chapter.trains_s, end_s) - begin_s
    at_s = view.at_s - begin_s
    claims: list[Interval] = []
    if view.cause == "join":
        claims.append(Interval("join", at_s, trains_s))
    elif view.cause != "start":
        claims.append(Interval("recovery", at_s, trains_s))
        if before is not None:
            claims.append(Interval("interrupted step", before.ended_s - begin_s, at_s))
    if chapter.count:
        # The steps that count come first, those that were lost with the generation last.
        begins_s, ends_s = chapter.began_s - begin_s, chapter.ended_s - begin_s
        lost_s = lost.get(chapter.number, 0.0)
        useful_s = max(chapter.sum_s - lost_s, 0.0)
        claims.append(Interval("productive", begins_s, min(begins_s + useful_s, ends_s)))
        claims.append(Interval("re-executed", max(ends_s - lost_s, begins_s), ends_s))
    return claims
