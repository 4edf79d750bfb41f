"""Where an epoch's steps and microbatches lie, and what a rank has to fetch for a step. Pure.

An epoch is a row of positions, cut into steps of ``batch`` samples; the last step has what is
left. A step's samples are spread over its microbatches as evenly as whole samples allow, so a
short step has short microbatches (some may be empty), and each counts by its samples. Nothing
here knows the number of ranks, except who runs which microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holdfast.elastic.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The samples of one step: ``count`` positions of an epoch from ``start`` on."""

    epoch: int
    start: int
    count: int

    def part(self, microbatch: int, *, of: int) -> range:
        """Return the positions of one microbatch ``of`` so many."""
        first = self.start + self.count * microbatch // of
        return range(first, self.start + self.count * (microbatch + 1) // of)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMicrobatch:
    """One microbatch of a step at a rank: its positions, and its weight in the step's mean.

    The weight is 1 where all microbatches are equally large. It is 0 for a stand-in: a rank
    none of whose microbatches has samples repeats another's without effect, because its part in
    the collectives of the backward pass is needed. So does one whose microbatch of a round has no
    samples, where another of the round has.
    """

    microbatch: int
    epoch: int
    positions: range
    weight: float


def next_step(*, epoch: int, offset: int, length: int, batch: int) -> Step:
    """Return the step that begins ``offset`` samples into ``epoch``, or at the next epoch."""
    if offset >= length:
        epoch, offset = epoch + 1, 0
    return Step(epoch=epoch, start=offset, count=min(batch, length - offset))


def steps_from(*, epoch: int, offset: int, length: int, batch: int) -> Iterator[Step]:
    """Yield step after step, epoch after epoch, without end."""
    while True:
        step = next_step(epoch=epoch, offset=offset, length=length, batch=batch)
        yield step
        epoch, offset = step.epoch, step.start + step.count


def parts(
    step: Step, mine: Sequence[int], *, microbatches: int, abreast: int = 1
) -> list[PlannedMicrobatch]:
    """Return what a rank with the microbatches ``mine`` does in a step; never nothing.

    Microbatches are run in rounds of so many ``abreast``, see `shares.part`; the ranks of a round
    do equally many.
    """
    found = []
    for m in mine:
        part = _part(step, m, of=microbatches)
        if part.weight:
            found.append(part)
        elif any(step.part(other, of=microbatches) for other in round_of(m, abreast=abreast)):
            found.append(_stand_in(step, microbatches=microbatches))
    return found or [_stand_in(step, microbatches=microbatches)]


def round_of(microbatch: int, *, abreast: int) -> range:
    """Return the microbatches that are run at the same time as this one, and itself."""
    first = microbatch - microbatch % abreast
    return range(first, first + abreast)


def _stand_in(step: Step, *, microbatches: int) -> PlannedMicrobatch:
    others = (_part(step, m, of=microbatches) for m in range(microbatches))
    model = next(part for part in others if part.weight)
    return replace(model, weight=0.0)


def _part(step: Step, microbatch: int, *, of: int) -> PlannedMicrobatch:
    positions = step.part(microbatch, of=of)
    weight = weight_of(len(positions), total=step.count, microbatches=of)
    return PlannedMicrobatch(
        microbatch=microbatch, epoch=step.epoch, positions=positions, weight=weight
    )


def weight_of(count: int, *, total: int, microbatches: int) -> float:
    """Return what a microbatch of ``count`` samples counts in a mean over all microbatches."""
    return count * microbatches / total


def check_batch(batch: int, *, microbatches: int) -> None:
    """Raise ``ConfigError`` where a step could not give every microbatch a sample."""
    if batch < microbatches:
        raise ConfigError(
            f"run.loader(batch={batch}): a step has {microbatches} microbatches, so it needs at "
            f"least {microbatches} samples; give more, or lower Batch(microbatches=...)"
        )
