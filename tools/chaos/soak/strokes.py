"""The strokes of a soak, drawn from a seed before anything runs. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from holdfast.elastic.events import (
    Event,
    FencingBegun,
    FencingDone,
    GenerationProposed,
    RankReformed,
    StateRestored,
    TrainingResumed,
)
from holdfast.tools.chaos.scenarios.catalogue import Part

NODES = {"a": 2, "b": 1, "c": 1, "d": 1}
"""The nodes, and the number of trainers that fit on each."""

FULL_BYTES = 1 << 30
"""Size of the shared memory that is filled."""


class SoakFaultKind(StrEnum):
    """A kind of fault on a node, or on a part of the job that belongs to no node."""

    KILL_WORKER = "kill a worker"
    KILL_SIDECAR = "kill a sidecar"
    KILL_AGENT = "kill an agent"
    KILL_NODE = "kill all of a node"
    LOSE_MACHINE = "lose a machine"
    STOP_WORKER = "stop a worker"
    STOP_SIDECAR = "stop a sidecar"
    STOP_AGENT = "stop an agent"
    SLOW_SIDECAR = "slow a sidecar"
    FLIP_SLOT = "flip a bit in an arena"
    FLIP_PARITY = "flip a bit in parity"
    FILL_MEMORY = "fill shared memory"
    KILL_LAUNCHER = "kill the launcher"
    KILL_COORDINATOR = "kill the coordinator"
    JUMP_CLOCK = "jump a clock"
    JUMP_CLOCKS = "jump all clocks"
    DRIFT_CLOCK = "drift a clock"
    FAIL_DISK = "fail a disk"
    FILL_DISK = "fill a disk"
    SLOW_DISK = "slow a disk"


KILLED_OF_JOB: Final[dict[SoakFaultKind, Part]] = {
    SoakFaultKind.KILL_LAUNCHER: "launcher",
    SoakFaultKind.KILL_COORDINATOR: "coordinator",
}
"""Kinds that kill a part of the job which belongs to no node."""

OF_JOB: Final = {*KILLED_OF_JOB, SoakFaultKind.JUMP_CLOCKS}
"""Kinds that hit no node in particular."""

OF_CLOCKS: Final[dict[SoakFaultKind, str]] = {
    SoakFaultKind.JUMP_CLOCK: "clock-jump",
    SoakFaultKind.JUMP_CLOCKS: "clock-jump",
    SoakFaultKind.DRIFT_CLOCK: "clock-skew",
}
OF_DISKS: Final[dict[SoakFaultKind, str]] = {
    SoakFaultKind.FAIL_DISK: "disk-write-error",
    SoakFaultKind.FILL_DISK: "disk-full",
    SoakFaultKind.SLOW_DISK: "disk-slow",
}
"""Fault of a soak → kind of a scenario's fault, of wall clocks and of disks."""

HARMLESS: Final = {
    SoakFaultKind.FILL_MEMORY,
    SoakFaultKind.SLOW_SIDECAR,
    *OF_JOB,
    *OF_CLOCKS,
    *OF_DISKS,
}
"""Kinds that cost no node its memory."""

ENDING = (
    SoakFaultKind.KILL_WORKER,
    SoakFaultKind.KILL_SIDECAR,
    SoakFaultKind.KILL_AGENT,
    SoakFaultKind.KILL_NODE,
    SoakFaultKind.LOSE_MACHINE,
    SoakFaultKind.KILL_LAUNCHER,
)
"""Kinds from which the job must recover."""

MOMENTS: Final[tuple[type[Event], ...]] = (
    FencingBegun,
    FencingDone,
    GenerationProposed,
    RankReformed,
    StateRestored,
    TrainingResumed,
)
"""Events of a recovery at which the next part may be lost."""

_TWO, _DURING = 0.2, 0.25
_SECONDS = {
    SoakFaultKind.STOP_WORKER: (0.05, 1.0),
    SoakFaultKind.STOP_SIDECAR: (0.05, 6.0),
    SoakFaultKind.STOP_AGENT: (0.05, 1.0),
    SoakFaultKind.SLOW_SIDECAR: (2.0, 8.0),
    SoakFaultKind.FILL_MEMORY: (1.0, 6.0),
    SoakFaultKind.KILL_LAUNCHER: (0.0, 3.0),
    SoakFaultKind.JUMP_CLOCK: (1.0, 8.0),
    SoakFaultKind.JUMP_CLOCKS: (1.0, 8.0),
    SoakFaultKind.DRIFT_CLOCK: (2.0, 10.0),
    SoakFaultKind.FAIL_DISK: (1.0, 8.0),
    SoakFaultKind.FILL_DISK: (1.0, 8.0),
    SoakFaultKind.SLOW_DISK: (2.0, 8.0),
}
_AMOUNTS: Final[dict[SoakFaultKind, tuple[float, float, str]]] = {
    SoakFaultKind.JUMP_CLOCK: (-7200.0, 7200.0, " by {:+.0f} s"),
    SoakFaultKind.JUMP_CLOCKS: (-7200.0, 7200.0, " by {:+.0f} s"),
    SoakFaultKind.DRIFT_CLOCK: (-0.5, 0.5, " by {:+.2f} s a second"),
    SoakFaultKind.SLOW_DISK: (0.01, 0.2, " by {:.2f} s a call"),
}
"""Least and most of the amount of a scenario's fault, and its words."""

_AWAY_STROKES = (1, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakFault:
    """A fault, on one node if it is not of the job; ``pick``, 0 to 1, selects process, file or bit.

    A temporary fault lasts ``seconds``; a lost machine returns after ``strokes`` strokes.
    ``amount`` is that of a scenario's fault, None if the kind has none.
    """

    kind: SoakFaultKind
    node: str
    pick: float
    seconds: float = 0.0
    strokes: int = 0
    amount: float | None = None

    def __str__(self) -> str:
        amount = "" if self.amount is None else _AMOUNTS[self.kind][-1].format(self.amount)
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        where = "" if self.kind in OF_JOB else f": {self.node}"
        return f"{self.kind}{amount}{lasting}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stroke:
    """``first`` after a pause, and ``then`` at once, or when the event ``moment`` is seen."""

    after_s: float
    first: SoakFault
    then: SoakFault | None = None
    moment: type[Event] | None = None

    @property
    def name(self) -> str:
        """Name under which the stroke is counted."""
        if self.then is None:
            return "one fault"
        return "a loss during recovery" if self.moment else "two faults at once"

    @property
    def harmed(self) -> set[str]:
        """The nodes that may lose their memory."""
        both = (self.first, self.then)
        return {each.node for each in both if each and each.kind not in HARMLESS}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSetup:
    """The training job of a soak.

    ``disk`` makes the nodes spill to their own disks too; ``patience_s`` is how long a stopped
    process may be silent before it counts as dead.
    """

    parity: int
    disk: bool
    incremental: bool
    patience_s: float
    width: int

    @classmethod
    def drawn(cls, seed: int) -> SoakSetup:
        """Return the setup of a seed: every second seed has parity 2; the rest is drawn."""
        draw = random.Random(f"holdfast soak setup {seed}")
        return cls(
            parity=1 + seed % 2,
            disk=draw.random() < 0.5,
            incremental=draw.random() < 0.5,
            patience_s=draw.choice((0.15, 4.0)),
            width=draw.choice((256, 512, 2048)),
        )


def strokes(
    seed: int,
    *,
    pause_s: tuple[float, float],
    kinds: Collection[SoakFaultKind] = tuple(SoakFaultKind),
) -> Iterator[Stroke]:
    """Yield strokes without end."""
    draw = random.Random(f"holdfast soak {seed}")
    wanted = [kind for kind in SoakFaultKind if kind in kinds]
    ending = [kind for kind in ENDING if kind in kinds]
    while True:
        after_s, how = draw.uniform(*pause_s), draw.random()
        first, second = draw.sample(sorted(NODES), 2)
        if how < _TWO:
            yield Stroke(
                after_s=after_s,
                first=_fault(draw, wanted, first),
                then=_fault(draw, wanted, second),
            )
        elif how < _TWO + _DURING and ending:
            yield Stroke(
                after_s=after_s,
                first=_fault(draw, ending, first),
                then=_fault(draw, ending, draw.choice((first, second))),
                moment=draw.choice(MOMENTS),
            )
        else:
            yield Stroke(after_s=after_s, first=_fault(draw, wanted, first))


def _fault(draw: random.Random, kinds: list[SoakFaultKind], node: str) -> SoakFault:
    kind = draw.choice(kinds)
    least_s, most_s = _SECONDS.get(kind, (0.0, 0.0))
    return SoakFault(
        kind=kind,
        node=node,
        pick=draw.random(),
        seconds=draw.uniform(least_s, most_s),
        strokes=draw.randint(*_AWAY_STROKES),
        amount=draw.uniform(*_AMOUNTS[kind][:2]) if kind in _AMOUNTS else None,
    )
