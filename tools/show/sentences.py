"""Every event as one sentence, understood without the events before it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from holdfast.ckpt.events import ENVELOPE
from holdfast.elastic.events import (
    CheckpointDone,
    CheckpointStarted,
    Detected,
    Event,
    EventsLost,
    FaultInjected,
    FaultOver,
    FencingBegun,
    FencingDone,
    GenerationProposed,
    JobEnded,
    JobSeated,
    JobStarted,
    NodeExited,
    NodeLeaving,
    RestoreFailed,
    RoleMoved,
    SidecarStarted,
    StateRestored,
    StepUnprotected,
    TrainingResumed,
    UserEvent,
    WorkerExited,
    WorkerHalted,
    WorkerStarted,
)
from holdfast.tools.show.narrate import cause_of, remarks

_MOST: Final = 200
"""Characters of a text that a sentence shows of a field."""


def sentence(event: Event) -> str:
    """Return the event in words; one that has none is its kind with all its fields."""
    found = _of_process(event) or _of_generation(event) or _of_state(event)
    return found or next(remarks(event), "") or _fields(event)


def _of_process(event: Event) -> str:
    match event:
        case JobStarted(run=run, nodes=nodes, wanted=wanted):
            workers = ", ".join(f"{count} {role}" for role, count in wanted.items())
            return f"job {run} starts on {', '.join(nodes)}: {workers}"
        case JobEnded(ok=ok, message=message):
            return f"the job is {'complete' if ok else 'over'}" + (
                f": {message}" if message else ""
            )
        case EventsLost(count=count):
            return f"{count} events before this one could not be written"
        case NodeExited(victim=victim, status=status, memory_kept=kept):
            return f"node {victim}: {status}; its snapshots are {'kept' if kept else 'gone'}"
        case NodeLeaving(reason=reason):
            return f"node {event.node} leaves: {reason}"
        case WorkerStarted(pid=pid, attempt=attempt):
            again = f", start {attempt}" if attempt > 1 else ""
            return f"{event.seat} starts, process {pid}{again}"
        case WorkerExited(pid=pid, status=status):
            return f"{event.seat}, process {pid}, ended: {status}"
        case SidecarStarted(pid=pid, address=address):
            return f"the sidecar of {event.node} serves at {address}, process {pid}"
        case FaultInjected(what=what, victim=victim):
            return f"fault on purpose: {what} {victim}"
        case FaultOver(what=what):
            return f"fault on purpose is over: {what}"
        case _:
            return ""


def _of_generation(event: Event) -> str:
    match event:
        case Detected():
            return cause_of(event)
        case JobSeated(reason=reason):
            return f"seats: {reason}"
        case RoleMoved(was=was, becomes=becomes, on=on, why=why):
            return f"{was} on {on or 'a lost node'} becomes {becomes}: {why}"
        case GenerationProposed(generation=generation, reason=reason):
            return reason or f"generation {generation} is proposed"
        case FencingBegun(generation=generation, reason=reason):
            return f"generation {generation} is over: {reason}"
        case FencingDone(generation=generation):
            return f"no worker of {event.node} acts in generation {generation} any more"
        case WorkerHalted(step=step):
            return f"{event.seat} stands at the end of step {step}, so that others can join"
        case TrainingResumed(generation=generation, step=step):
            return f"{event.seat} trains from step {step} on, generation {generation}"
        case _:
            return ""


def _of_state(event: Event) -> str:
    match event:
        case StateRestored(generation=generation, step=step, tier=tier, seconds=seconds):
            where = f" from {tier}" if tier else ""
            took = f"in {seconds:.2f} s, generation {generation}"
            return f"{event.seat} restored step {step}{where} {took}"
        case RestoreFailed(step=step, of=of, reason=reason, next=then):
            return f"step {step} cannot be restored at rank {of}: {reason}; next: {then}"
        case StepUnprotected(step=step, reason=reason):
            return f"step {step} is not protected: {reason}"
        case CheckpointStarted(step=step, bytes=size_bytes):
            return f"checkpoint of step {step} begins, {_mib(size_bytes)}"
        case CheckpointDone(step=step, bytes=size_bytes, seconds=seconds):
            return f"checkpoint of step {step} is durable: {_mib(size_bytes)} in {seconds:.2f} s"
        case _:
            return ""


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def _fields(event: Event) -> str:
    """Return ``kind: field value, …`` without the envelope and without empty values."""
    if isinstance(event, UserEvent):
        found: Iterable[tuple[str, object]] = event.fields.items()
    else:
        found = msgspec.structs.asdict(event).items()
    told = [(name, _short(value)) for name, value in found if name not in ENVELOPE]
    words = ", ".join(f"{name} {text}" for name, text in told if text)
    return f"{event.kind}: {words}" if words else event.kind


def _short(value: object) -> str:
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = " ".join(text.split())
    return text if len(text) <= _MOST else f"{text[:_MOST]}…"
