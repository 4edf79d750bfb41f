"""Events as messages for people, with the planner's reasons. Pure."""

from __future__ import annotations

from typing import Final

from holdfast.elastic.events import (
    CheckpointDone,
    CheckpointFailed,
    CheckpointProgress,
    CheckpointUnsaved,
    CheckpointWaiting,
    Detected,
    DiskRefused,
    Event,
    EventsLost,
    FaultInjected,
    FaultOver,
    GenerationProposed,
    IslandJoined,
    IslandLeft,
    JobEnded,
    JobSeated,
    JobStarted,
    LossJudged,
    NodeExited,
    NodeLeaving,
    NodeReachable,
    RestoreFailed,
    RestoreProgressed,
    RoleMoved,
    RolloutLeft,
    RolloutRecovered,
    RuleViolated,
    SampledUnprotected,
    SharesChanged,
    SidecarFailed,
    SnapshotsLeftOut,
    StepUnprotected,
    StragglerOver,
    TrainingResumed,
    VersionUnavailable,
    WeightsRefused,
    WorkerExited,
    WorkerHandedOver,
)
from holdfast.elastic.events.job import MOVED
from holdfast.tools.live.view import Level, RunMessage, RunView
from holdfast.tools.show.narrate import cause_of, remarks

_GOOD: Final = (NodeReachable, StragglerOver, CheckpointWaiting, WorkerHandedOver)
_BAD: Final = (CheckpointFailed, CheckpointUnsaved)
_LEFT_OUT: Final = (CheckpointProgress,)
_NAMED: Final = 6
_LONGEST: Final = 600
"""Characters of a text at most; a traceback has its place in the log."""


def message_of(event: Event) -> RunMessage | None:
    """Return the message for an event; None for one that is of no interest by itself."""
    found = _of_job(event) or _of_nodes(event) or _of_state(event) or _of_rollouts(event)
    if found is None and not isinstance(event, _LEFT_OUT):
        text = " ".join(remarks(event))
        level: Level = "bad" if isinstance(event, _BAD) else "warn"
        found = ("good" if isinstance(event, _GOOD) else level, text, "") if text else None
    if found is None:
        return None
    level, text, reason = found
    return RunMessage(
        at_s=event.time_s,
        level=level,
        node=event.node,
        text=_short(text),
        reason=_short(reason),
    )


def partly(view: RunView) -> str:
    """Return what a view does not know of its run, and what to give; empty if it knows all."""
    if view.source == "coordinator":
        return (
            "Only what the coordinator and the nodes hold now is known. Steps over time, goodput, "
            "costs, messages and curves need events: give the job's run directories too."
        )
    if view.unheard:
        more = len(view.unheard) - _NAMED
        names = ", ".join(view.unheard[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        return (
            f"No events of {names} are read: their steps, losses and messages are missing in times "
            "and costs. Give the run directories of their machines too."
        )
    if not view.timed:
        return (
            "No events of rank 0 are read: goodput and the costs of recoveries are not known. Give "
            "the run directories of all machines of the job."
        )
    return ""


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


_Told = tuple[Level, str, str]


def _of_job(event: Event) -> _Told | None:
    match event:
        case JobStarted(nodes=nodes):
            noun = "node" if len(nodes) == 1 else "nodes"
            return "note", f"the job starts on {len(nodes)} {noun}", ""
        case JobEnded(ok=ok, message=message):
            return ("good" if ok else "bad"), f"the job is over: {message or 'completed'}", ""
        case Detected(what="join", victim=victim):
            return "note", f"{victim} is ready to join", event.why
        case Detected():
            return "bad", cause_of(event), ""
        case GenerationProposed(generation=number, ranks=ranks):
            from_step = "" if event.restore_step is None else f", from step {event.restore_step}"
            text = f"generation {number} is planned: {len(ranks)} trainers{from_step}"
            return "note", text, event.reason
        case TrainingResumed(generation=number, step=step):
            return "good", f"generation {number} trains: step {step} is complete", ""
        case JobSeated(reason=reason):
            return "note", "workers get their places", reason
        case RoleMoved(was=was, becomes=becomes, on=on, why=why):
            return "note", f"{was} on {on or 'a lost node'} becomes {becomes}", why
    return None


def _of_nodes(event: Event) -> _Told | None:
    match event:
        case NodeExited(victim=victim, status=status):
            kept = "its snapshots are kept" if event.memory_kept else "its memory is gone"
            return "bad", f"the agent of {victim} ended ({status}); {kept}", ""
        case NodeLeaving(reason=reason):
            return "warn", f"{event.node} leaves", reason
        case WorkerExited(status=status) if status == MOVED:
            return "note", f"{event.seat} on {event.node} ended: {status}", ""
        case WorkerExited(status=status) if not status.endswith("status 0"):
            return "warn", f"{event.seat or 'a worker'} on {event.node} ended: {status}", ""
        case FaultInjected(what=what, victim=victim):
            return "warn", f"fault injected: {what} of {victim}", ""
        case FaultOver(what=what):
            return "note", f"the fault is over: {what}", ""
        case SidecarFailed(error=error):
            return "bad", f"the sidecar of {event.node} does not start: {error}", ""
        case EventsLost(count=count):
            return "warn", f"{count} events of {event.node} could not be written", ""
    return None


def _of_state(event: Event) -> _Told | None:
    match event:
        case RestoreFailed(step=step, reason=reason, next=then):
            return "bad", f"step {step} cannot be restored; next: {then}", reason
        case DiskRefused(step=step, reason=reason):
            return "warn", f"the disks hold too little of step {step}", reason
        case StepUnprotected(step=step, reason=reason):
            return "warn", f"step {step} is not protected", reason
        case SnapshotsLeftOut(count=count, newest=newest, reason=reason):
            text = f"{event.seat}: no snapshots since step {newest}, {count} left out so far"
            return "bad", text, reason
        case CheckpointDone(step=step, seconds=seconds):
            return "routine", f"checkpoint of step {step} is durable after {seconds:.2f} s", ""
        case RestoreProgressed(rank=0):
            return "note", " ".join(remarks(event)), ""
        case LossJudged(action="stop"):
            return "bad", " ".join(remarks(event)), ""
        case SharesChanged(shares=shares, reason=reason):
            return "note", f"microbatches are shared out anew: {list(shares)}", reason
    return None


def _of_rollouts(event: Event) -> _Told | None:
    match event:
        case RolloutRecovered(worker=worker, unfinished=unfinished, tokens=tokens):
            text = f"{unfinished} unfinished samples of {worker} go on elsewhere"
            return "good", f"{text}, {tokens} tokens from its log", ""
        case RolloutLeft(worker=worker, samples=samples):
            return "note", f"{worker} handed over {samples} unfinished samples", ""
        case WeightsRefused(version=version, why=why):
            return "warn", f"{event.seat} refused the weights of version {version}", why
        case VersionUnavailable(version=version, why=why):
            return "warn", f"{event.seat} cannot have the weights of version {version}", why
        case SampledUnprotected(step=step):
            return "warn", f"samples come from weights of step {step}, which is not protected", ""
        case RuleViolated(step=step, what=what):
            return "bad", f"step {step}: {what}", ""
        case IslandJoined(island=island, how=how):
            return "good", f"island {island} takes part; its weights were {how}", ""
        case IslandLeft(island=island, why=why):
            return "warn", f"island {island} takes part no more: {why}", ""
    return None
