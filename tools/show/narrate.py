"""Narration of a run's events in short lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.elastic.events import (
    CheckpointCarried,
    CheckpointFailed,
    CheckpointProgress,
    CheckpointRetried,
    CheckpointSkipped,
    CheckpointUnsaved,
    CheckpointWaiting,
    DataWorkerDeath,
    DataWorkerHang,
    DataWorkersForked,
    Detected,
    Event,
    GenerationProposed,
    JobEnded,
    JobStarted,
    LossJudged,
    NodeReachable,
    RestoreProgressed,
    SidecarFailed,
    SnapshotsLeftOut,
    StateApproximate,
    StragglerFound,
    StragglerOver,
    TrainingResumed,
    WorkerHandedOver,
    WorkerRehearsed,
    WorkerStack,
)
from holdfast.elastic.membership.records import TRAINER
from holdfast.tools.report.snapshot_costs import Costs
from holdfast.tools.terminal import readable

_WHAT = {
    "stopped": "was stopped",
    "hang": "hung",
    "node_lost": "was lost",
    "sidecar_exit": "ended",
    "lease_lost": "lost its lease",
    "join": "joined",
    "notice": "got notice of its end",
    "stall": "made no progress",
}
_OF_NODES = ("node_lost", "sidecar_exit", "lease_lost", "unreachable")
_ACTIONS = {
    "warn": "noted",
    "skip": "the step is skipped",
    "rollback": "going back",
    "stop": "the job ends",
}


class Narrator:
    """Follows the events of one run and returns lines for those that matter to people."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._causes: list[str] = []
        self._caused_t: float | None = None
        self._proposals: dict[int, GenerationProposed] = {}
        self._wanted = 0
        self._last_generation = 0
        self._costs = Costs()

    def lines(self, event: Event) -> Iterator[str]:
        """Yield the lines for ``event``."""
        if self._quiet:
            return
        self._costs.add(event)
        match event:
            case JobStarted(wanted=wanted):
                self._wanted = wanted.get(TRAINER, 0)
            case Detected():
                yield from self._detected(event)
            case GenerationProposed(generation=generation):
                self._proposals[generation] = event
            case TrainingResumed():
                yield from self._resumed(event)
            case JobEnded():
                if (cost := self._costs.total()) is not None:
                    yield str(cost)
            case _:
                yield from remarks(event)

    def _detected(self, event: Detected) -> Iterator[str]:
        cause = cause_of(event)
        if event.victim.startswith(f"{TRAINER}/") or event.what in _OF_NODES:
            self._causes.append(cause)
            if event.what != "join" and self._caused_t is None:
                self._caused_t = event.time_s
        if event.what != "join":
            yield cause

    def _resumed(self, event: TrainingResumed) -> Iterator[str]:
        number = event.generation
        if number <= self._last_generation or (proposal := self._proposals.get(number)) is None:
            return
        first, self._last_generation = self._last_generation == 0, number
        count = len(proposal.ranks)
        of = f" of {self._wanted}" if count < self._wanted else ""
        noun = "trainer" if max(count, self._wanted if of else 0) == 1 else "trainers"
        after = f" after {', '.join(self._causes)}" if self._causes else ""
        took = f" in {event.time_s - self._caused_t:.2f} s" if self._caused_t else ""
        fresh = proposal.restore_step is None and event.step <= 1
        started = "started" if first else "nothing was left to restore, started over from step 0"
        verb = started if fresh else f"resumed at step {event.step}"
        self._causes, self._caused_t = [], None
        yield f"generation {number}: {count}{of} {noun}{after}; {verb}{took}"


def remarks(event: Event) -> Iterator[str]:
    """Yield the lines for an event that need no other event to be understood."""
    yield from _checkpoint(event)
    yield from _data_worker(event)
    yield from _remark(event)


def _remark(event: Event) -> Iterator[str]:
    match event:
        case SnapshotsLeftOut():
            yield (
                f"{event.seat}: SNAPSHOTS ARE SKIPPED since step {event.newest}, "
                f"{event.count} so far: {event.reason}"
            )
        case StateApproximate(text=text, fresh=fresh):
            yield f"{'THE MODEL IS' if fresh else 'the model is'} {text}"
        case SidecarFailed(error=error):
            yield f"the sidecar of {event.node} does not start: {error}"
        case WorkerStack(at=at) if at:
            yield f"{event.seat} is in {at}"
        case StragglerFound(why=why):
            yield why
        case NodeReachable(victim=victim):
            yield f"node {event.node} reaches node {victim} again"
        case StragglerOver(victim=victim):
            yield f"{victim} keeps up with the others again"
        case LossJudged(step=step, why=why, action=action):
            yield f"step {step}: {why} ({_ACTIONS[action]})"
        case WorkerHandedOver(step=step):
            yield f"{event.seat} hands over at step {step}"
        case WorkerRehearsed(error=error, over=False) if error:
            yield f"{event.seat}: its rehearsal ended early: {error}"


def _checkpoint(event: Event) -> Iterator[str]:
    match event:
        case CheckpointProgress(step=step, bytes=written, total_bytes=total) if total:
            yield f"checkpoint of step {step}: {written / total:.0%} written"
        case RestoreProgressed(rank=0, step=step, bytes=read, total_bytes=total):
            left = f"{readable(event.bytes_per_s)}/s, {event.left_s:.0f} s left"
            yield f"checkpoint of step {step}: {read / total:.0%} read by rank 0, {left}"
        case CheckpointWaiting(step=step, done=done):
            yield f"waiting for the checkpoint of step {step}: {done:.0%}"
        case CheckpointRetried(attempt=attempt, error=error):
            yield f"{error}; trying again ({attempt})"
        case CheckpointCarried(step=step):
            yield f"checkpoint of step {step} is carried over to the new generation"
        case CheckpointSkipped(step=step, reason=reason):
            yield f"checkpoint of step {step} was skipped: {reason}"
        case CheckpointFailed(error=error) | CheckpointUnsaved(error=error):
            yield error


def _data_worker(event: Event) -> Iterator[str]:
    match event:
        case DataWorkersForked(loader=loader, why=why):
            yield f"{event.seat}: loader {loader!r} forks its worker processes: {why}"
        case DataWorkerDeath() | DataWorkerHang():
            what = "was stuck" if isinstance(event, DataWorkerHang) else "died"
            more = f", {event.times} times since the last batch" if event.times > 1 else ""
            yield (
                f"{event.seat}: a worker process of loader {event.loader!r} {what} "
                f"({event.how}){more}; they are started again"
            )


def cause_of(event: Detected) -> str:
    """Return a loss, a join or a notice in words."""
    victim, what, why = event.victim, event.what, event.why
    if what == "unreachable":
        return why
    if what == "exit":
        return f"{victim} was {why}" if why.startswith("killed") else f"{victim} ended with {why}"
    text = f"{victim} {_WHAT.get(what, what)}"
    return f"{text} ({why})" if why else text
