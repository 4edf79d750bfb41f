"""The strikes of a scenario under a seed, numbered, drawn before anything runs. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator

import msgspec

from holdfast.tools.chaos.scenarios.scenario import FaultSpec, Scenario, StrikeTarget, When


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """A planned fault; ``number`` is its position in the schedule and identifies it.

    ``when`` is one moment: ``s``, ``step``, ``state`` or ``recovery``. ``pick``, from 0 to 1,
    decides everything that the target leaves open: which victim, which file, which bit.
    """

    number: int
    kind: str
    target: StrikeTarget
    when: When
    pick: float
    lasts_s: float = 0.0
    amount: float | None = None


def draw(
    scenario: Scenario, *, seed: int | None = None, only: Collection[int] | None = None
) -> tuple[Strike, ...]:
    """Return the strikes of a seed (default: the scenario's own), in the order of the file.

    ``only`` keeps the strikes with these numbers unchanged: omitted strikes still draw.
    """
    source = random.Random(f"{scenario.name} {scenario.seed if seed is None else seed}")
    found = (
        each for fault in scenario.fault for each in _moments(source, fault, scenario.lifetime_s)
    )
    strikes = tuple(
        Strike(
            number=number,
            kind=fault.kind,
            target=fault.target,
            when=when,
            pick=source.random(),
            lasts_s=_drawn(source, fault.lasts_s),
            amount=None if fault.amount is None else _drawn(source, fault.amount),
        )
        for number, (fault, when) in enumerate(found)
    )
    return strikes if only is None else tuple(each for each in strikes if each.number in only)


def _moments(
    source: random.Random, fault: FaultSpec, lifetime_s: float
) -> Iterator[tuple[FaultSpec, When]]:
    """Yield a fault with each of its moments; repetition becomes moments in seconds."""
    when = fault.when
    pause_s = when.every_s or when.poisson_s
    if pause_s is None:
        for _ in range(max(when.times, 1)):
            yield fault, msgspec.structs.replace(when, times=1)
        return
    at_s, done = when.after_s, 0
    while not when.times or done < when.times:
        at_s += pause_s if when.poisson_s is None else source.expovariate(1 / pause_s)
        if at_s > lifetime_s:
            return
        done += 1
        yield fault, When(s=round(at_s, 3))


def _drawn(source: random.Random, value: float | tuple[float, float]) -> float:
    return round(source.uniform(*value), 4) if isinstance(value, tuple) else value
