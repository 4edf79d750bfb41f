"""The next source after a restore point fails while it is read, the same for all ranks. Pure.

Every rank sends the others the faults it found. From the same faults each computes the same next
attempt, without further communication. Attempts go from new to old: first the same step with the
faulty blocks rebuilt from parity, then the next older point in memory. If nothing is left in
memory, the newest checkpoint is loaded, or training starts from the beginning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from holdfast.ckpt.memory.records import BlockSource, RestorePoint
from holdfast.ckpt.types import learn

MAX_ATTEMPTS = 8
"""The most attempts of one generation to read from memory before it uses the checkpoint."""

WHOLE_POINT = -1
"""The rank of a fault of no single block: the blocks do not belong together."""


class ReadFaultKind(StrEnum):
    """The kind of a block's fault."""

    DAMAGED = "damaged"
    MISSING = "missing"
    UNREACHABLE = "unreachable"


class ReadFault(msgspec.Struct, frozen=True, kw_only=True):
    """One block that could not be read at ``node``; found by any rank."""

    rank: int
    node: str
    kind: ReadFaultKind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The attempt to make now (``point`` is None when memory has nothing more) and those left.

    ``nodes`` can rebuild a block; ``why`` says how this attempt was chosen, and ``reasons`` what
    failed in the attempts before.
    """

    point: RestorePoint | None
    older: tuple[RestorePoint, ...]
    nodes: tuple[str, ...]
    left: int = MAX_ATTEMPTS - 1
    why: str = ""
    reasons: tuple[str, ...] = ()


def first_course(
    restore: RestorePoint | None, fallbacks: Iterable[RestorePoint], *, nodes: Iterable[str]
) -> Course:
    """Return the attempt that the plan of a generation names; ``nodes`` are all with a sidecar."""
    return Course(point=restore, older=tuple(fallbacks), nodes=tuple(sorted(nodes)))


def next_course(course: Course, faults: Iterable[ReadFault]) -> Course:
    """Return the next attempt after ``faults`` (of all ranks, at least one) ended one."""
    point = course.point
    if point is None:
        raise ValueError("there was no attempt that could have failed")
    found = sorted(set(faults), key=lambda each: (each.rank, each.node, each.kind, each.reason))
    gone = {fault.node for fault in found if fault.kind is ReadFaultKind.UNREACHABLE}
    nodes = tuple(node for node in course.nodes if node not in gone)
    reasons = (*course.reasons, f"{_name(point)}: {'; '.join(_words(found))}")

    def going_on(point: RestorePoint | None, older: Sequence[RestorePoint], why: str) -> Course:
        return Course(
            point=point,
            older=tuple(older),
            nodes=nodes,
            left=course.left - 1,
            why=why,
            reasons=reasons,
        )

    if course.left <= 0:
        return going_on(None, (), f"{len(reasons)} attempts to restore from memory failed")
    again, refused = _rebuilt(point, found, nodes=nodes)
    if again is not None:
        return going_on(again, course.older, _rebuilt_words(point, again))
    for number, older in enumerate(course.older):
        moved, why_not = _rebuilt(older, (), nodes=nodes)
        if moved is not None:
            why = f"{refused}; {_name(older)} is the next older one"
            return going_on(moved, course.older[number + 1 :], why)
        refused = f"{refused}; {_name(older)}: {why_not}"
    return going_on(None, (), f"{refused}; no other step is in memory")


def _rebuilt(
    point: RestorePoint, faults: Sequence[ReadFault], *, nodes: Sequence[str]
) -> tuple[RestorePoint | None, str]:
    """Return ``point`` with every faulty or lost block rebuilt, or the reason why not.

    A block is rebuilt on the node that held it, or on another one when that node is gone.
    """
    at_fault = {fault.rank: fault for fault in faults}
    if WHOLE_POINT in at_fault:
        return None, f"{_name(point)} is inconsistent"
    sources: list[BlockSource] = []
    for source in point.sources:
        fault, gone = at_fault.get(source.rank), source.node not in nodes
        if fault is None and not gone:
            sources.append(source)
            continue
        if source.rebuilt and not gone:
            return None, f"the block of rank {source.rank} cannot be rebuilt either"
        if not point.world.parity:
            return None, f"no parity guards the block of rank {source.rank}"
        if not nodes:
            return None, "no sidecar can be reached"
        node = nodes[source.rank % len(nodes)] if gone else source.node
        sources.append(BlockSource(rank=source.rank, node=node, rebuilt=True))
    return RestorePoint(world=point.world, step=point.step, sources=tuple(sources)), ""


def _rebuilt_words(before: RestorePoint, now: RestorePoint) -> str:
    changed = [new for old, new in zip(before.sources, now.sources, strict=True) if old != new]
    if not changed:
        return "a second attempt from the same sources"
    return ", ".join(f"rank {source.rank} rebuilt on {source.node}" for source in changed)


def _name(point: RestorePoint) -> str:
    return f"step {point.step} of generation {point.world.generation}"


def _words(faults: Collection[ReadFault]) -> list[str]:
    """Return each fault's reason once, however many ranks found it."""
    return list(dict.fromkeys(fault.reason for fault in faults))


learn(globals())
