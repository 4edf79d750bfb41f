"""Faults as values: drawn from a seed, injected by the simulator, shrunk to the few needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from holdfast.elastic.testing.shrinking import FailureOracle, fewest


class SimulatedFaultKind(StrEnum):
    """The kinds of simulated faults."""

    WORKER = "worker"
    """A worker is killed."""
    HANG = "hang"
    """A worker makes no progress and reacts to nothing."""
    NODE = "node"
    """A node is lost with its memory; it comes back empty when the fault is over."""
    SIDECAR = "sidecar"
    """A sidecar is killed with its memory; its agent starts another."""
    PAUSE = "pause"
    """An agent is stopped and continues later; its workers and sidecar are not stopped."""
    CRASH = "crash"
    """A node is lost at one of its agent's next calls, before or after the call's effect."""
    CUT = "cut"
    """A node is cut off from all others and from the coordinator."""
    DEAF = "deaf"
    """A node can send but not receive."""
    MUTE = "mute"
    """A node can receive but not send."""
    SPLIT = "split"
    """Two sets of nodes do not reach each other; all nodes reach the coordinator."""
    APART = "apart"
    """Two nodes do not reach each other; all other nodes reach both."""
    WEATHER = "weather"
    """Messages everywhere are lost, duplicated and delayed."""
    OUTAGE = "outage"
    """The coordinator answers no node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFault:
    """``kind`` happens to node number ``node`` at ``at_s`` and lasts ``lasts_s`` (0: for good).

    ``pick`` (0 … 1) chooses the open details of the kind: the worker, the strength of the weather,
    the call. ``seat`` names the worker instead. A hung worker continues after ``lasts_s``. A fault
    without a target does nothing. ``other`` is the second of two nodes that are apart, -1 to let
    ``pick`` choose it; ``pick`` chooses the direction as well.
    """

    kind: SimulatedFaultKind
    at_s: float
    node: int = 0
    lasts_s: float = 0.0
    pick: float = 0.0
    seat: str = ""
    other: int = -1


_LASTING = {
    SimulatedFaultKind.NODE: (0.05, 4.0),
    SimulatedFaultKind.CRASH: (0.05, 4.0),
    SimulatedFaultKind.PAUSE: (0.1, 2.5),
    SimulatedFaultKind.CUT: (0.1, 4.0),
    SimulatedFaultKind.DEAF: (0.1, 4.0),
    SimulatedFaultKind.MUTE: (0.1, 4.0),
    SimulatedFaultKind.SPLIT: (0.1, 3.0),
    SimulatedFaultKind.APART: (0.1, 6.0),
    SimulatedFaultKind.WEATHER: (0.2, 3.0),
    SimulatedFaultKind.OUTAGE: (0.1, 2.0),
}
_FREQUENT = (SimulatedFaultKind.WORKER, SimulatedFaultKind.NODE)
_FOR_GOOD = 0.3
"""Fraction of the lost nodes that come back only when all faults are ended."""
_ALSO_APART = 0.2
"""Fraction of schedules that also have two nodes apart; drawn last, to keep the other draws equal.
"""


def draw_faults(
    random: Random, *, bursts: int, nodes: int, until_s: float, after_s: float = 0.3
) -> tuple[SimulatedFault, ...]:
    """Draw bursts of one to three faults each; the next comes while the job handles the last.

    They begin between ``after_s`` and ``until_s``.
    """
    kinds = (
        *(kind for kind in SimulatedFaultKind if kind is not SimulatedFaultKind.APART),
        *_FREQUENT,
    )
    faults = []
    for _ in range(bursts):
        at_s = random.uniform(after_s, until_s)
        for _ in range(random.choice((1, 1, 2, 3))):
            kind = random.choice(kinds)
            lasts_s = random.uniform(*_LASTING.get(kind, (0.0, 0.0)))
            if (
                kind in (SimulatedFaultKind.NODE, SimulatedFaultKind.CRASH)
                and random.random() < _FOR_GOOD
            ):
                lasts_s = 0.0
            faults.append(
                SimulatedFault(
                    kind=kind,
                    at_s=round(at_s + random.uniform(0, 0.4), 4),
                    node=random.randrange(nodes),
                    lasts_s=round(lasts_s, 4),
                    pick=round(random.random(), 4),
                )
            )
    if bursts and random.random() < _ALSO_APART:
        faults.append(
            SimulatedFault(
                kind=SimulatedFaultKind.APART,
                at_s=round(random.uniform(after_s, until_s), 4),
                node=random.randrange(nodes),
                lasts_s=round(random.uniform(*_LASTING[SimulatedFaultKind.APART]), 4),
                pick=round(random.random(), 4),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def shrink(
    faults: Sequence[SimulatedFault],
    *,
    fails: Callable[[Sequence[SimulatedFault]], bool],
    tries: int = 400,
) -> tuple[SimulatedFault, ...]:
    """Return a smaller schedule that still fails and from which no fault can be removed.

    Ever smaller pieces are removed as long as the rest fails (`shrinking.fewest`); then the times
    are rounded. ``fails`` is called at most ``tries`` times.
    """
    oracle = FailureOracle(fails, tries)
    kept = fewest(faults, fails=oracle)
    for digits in (0, 1, 2):
        for number, fault in enumerate(kept):
            plain = replace(fault, at_s=round(fault.at_s, digits))
            changed = (*kept[:number], plain, *kept[number + 1 :])
            if plain != fault and oracle(changed):
                kept = changed
    return fewest(kept, fails=oracle)  # at rounded times fewer may be enough
