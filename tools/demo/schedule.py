"""When the demo hurts its job, and whom: decided by a seed and what runs at that moment. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

import msgspec

from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of
from holdfast.tools.report.timeline import KILL_NODE, KILL_ROLLOUT, KILL_TRAINER

MIN_STEPS = 20


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """A planned kill: once ``step`` is completed, after ``delay`` of a usual step's time."""

    kind: str
    step: int
    delay: float


class KillTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What to kill on ``node``: a seat (``"trainer/1"``) or all of it; ``seats`` die with it."""

    name: str
    node: str
    seats: tuple[str, ...]


def schedule(seed: int, steps: int) -> tuple[Kill, ...]:
    """Return the kills of a job of ``steps`` steps, one of each kind, in order of step.

    Each has its own stretch of the steps from one tenth to six tenths. The rollout worker's is in
    the middle: after the loss of a trainer the job goes on smaller until its successor has
    joined, and only then can it afford to lose the next; the end is left for that as well. Raises
    ``ValueError`` when there are too few steps.
    """
    if steps < MIN_STEPS:
        raise ValueError(
            f"{steps} steps leave no time to recover between kills, needed: {MIN_STEPS}"
        )
    first, stretch = max(2, steps // 10), steps / 6
    draw = random.Random(f"holdfast schedule {seed}")
    before, after = draw.sample((KILL_TRAINER, KILL_NODE), 2)
    return tuple(
        Kill(
            kind=kind,
            step=int(first + at * stretch + draw.random() * (stretch - 1)),
            delay=draw.random(),
        )
        for at, kind in enumerate((before, KILL_ROLLOUT, after))
    )


def victims(
    kind: str, running: Mapping[str, Collection[str]], *, busy: Collection[str]
) -> list[KillTarget]:
    """Return who may be killed now, sorted; empty when nobody may.

    ``running`` maps every living node to the seats whose workers take part; ``busy`` are the
    seats of rollout workers in the middle of a sequence. A trainer or a node is spared when it
    holds the last trainer, a node also when it holds the last rollout worker.
    """
    trainers = {(n, s) for n, seats in running.items() for s in seats if role_of(s) == TRAINER}
    others = {(n, s) for n, seats in running.items() for s in seats if role_of(s) != TRAINER}
    if kind == KILL_NODE:
        return [
            KillTarget(name=node, node=node, seats=tuple(sorted(running[node])))
            for node in sorted(running)
            if any(where == node for where, _ in trainers)
            and any(where != node for where, _ in trainers)
            and any(where != node for where, _ in others)
        ]
    if kind == KILL_TRAINER:
        chosen = trainers if len(trainers) > 1 else set()
    else:
        chosen = {(node, seat) for node, seat in others if seat in busy}
    return [KillTarget(name=seat, node=node, seats=(seat,)) for node, seat in sorted(chosen)]
