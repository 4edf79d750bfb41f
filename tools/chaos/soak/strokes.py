"""Which harm is done in a soak: drawn from a seed, before anything runs. Pure."""

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

NODES = {"a": 2, "b": 1, "c": 1, "d": 1}
"""The nodes and how many trainers each has room for."""

FULL_BYTES = 1 << 30
"""Length of the shared memory that is filled."""


class SoakFaultKind(StrEnum):
    """What is done to a node."""

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


HARMLESS = {SoakFaultKind.FILL_MEMORY, SoakFaultKind.SLOW_SIDECAR}
"""What costs no node anything it holds."""

ENDING = (
    SoakFaultKind.KILL_WORKER,
    SoakFaultKind.KILL_SIDECAR,
    SoakFaultKind.KILL_AGENT,
    SoakFaultKind.KILL_NODE,
    SoakFaultKind.LOSE_MACHINE,
)
"""What the job must recover from."""

MOMENTS: Final[tuple[type[Event], ...]] = (
    FencingBegun,
    FencingDone,
    GenerationProposed,
    RankReformed,
    StateRestored,
    TrainingResumed,
)
"""Events of a recovery at which the next thing may be lost."""

_TWO, _DURING = 0.2, 0.25
_SECONDS = {
    SoakFaultKind.STOP_WORKER: (0.05, 1.0),
    SoakFaultKind.STOP_SIDECAR: (0.05, 6.0),
    SoakFaultKind.STOP_AGENT: (0.05, 1.0),
    SoakFaultKind.SLOW_SIDECAR: (2.0, 8.0),
    SoakFaultKind.FILL_MEMORY: (1.0, 6.0),
}
_AWAY_STROKES = (1, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakFault:
    """Harm to one node; ``pick``, from 0 to 1, says which of its processes, files or bits.

    What passes lasts ``seconds``; a machine that is lost returns after so many ``strokes``.
    """

    kind: SoakFaultKind
    node: str
    pick: float
    seconds: float = 0.0
    strokes: int = 0

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind}{lasting}: {self.node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stroke:
    """``first`` after a pause, and ``then``: at once, or when the event ``moment`` is seen."""

    after_s: float
    first: SoakFault
    then: SoakFault | None = None
    moment: type[Event] | None = None

    @property
    def name(self) -> str:
        """What is counted."""
        if self.then is None:
            return "one fault"
        return "a loss during recovery" if self.moment else "two faults at once"

    @property
    def harmed(self) -> set[str]:
        """The nodes that may lose what they hold."""
        both = (self.first, self.then)
        return {each.node for each in both if each and each.kind not in HARMLESS}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSetup:
    """What is trained under faults.

    ``disk`` spills to the nodes' own disks too; ``patience_s`` is how long a stopped process is
    waited for before it is taken for dead.
    """

    parity: int
    disk: bool
    incremental: bool
    patience_s: float
    width: int

    @classmethod
    def drawn(cls, seed: int) -> SoakSetup:
        """Return the setup of a seed: every second has parity 2, and so on."""
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
    """Yield what happens, one stroke after the other, without end."""
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
    )
