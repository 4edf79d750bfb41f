"""Schedule and victims of the demo's kills, from a seed and the workers then running. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

import msgspec

from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of
from holdfast.tools.report.timeline import KILL_NODE, KILL_ROLLOUT, KILL_TRAINER

MIN_STEPS = 20


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """A planned kill, due ``delay`` times a usual step's duration after ``step`` is completed."""

    kind: str
    step: int
    delay: float


class KillTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A target on ``node``: a seat (``"trainer/1"``) or the whole node; ``seats`` die with it."""

    name: str
    node: str
    seats: tuple[str, ...]


def schedule(seed: int, steps: int) -> tuple[Kill, ...]:
    """Return the kills of a job of ``steps`` steps, one of each kind, in order of step.

    Each kill has its own range of the steps between one tenth and six tenths. The rollout worker's
    kill is in the middle: after the loss of a trainer the job runs with fewer trainers until the
    successor has joined, and only then can it lose another one. The last steps are left for that
    too. Raises ``ValueError`` if there are too few steps.
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
    """Return the targets that may be killed now, sorted; empty if there are none.

    ``running`` maps every living node to the seats whose workers take part; ``busy`` are the seats
    of rollout workers in the middle of a sequence. A trainer or a node is spared if it holds the
    last trainer, a node also if it holds the last rollout worker.
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
