"""The division of an epoch into steps and microbatches, and a rank's fetches for a step. Pure.

An epoch is a sequence of positions, split into steps of ``batch`` samples; the last step has the
rest. A step's samples are spread over its microbatches as evenly as whole samples allow. So a short
step has short microbatches (some may be empty), and each is weighted by its samples. The number of
ranks only decides which rank runs which microbatch.
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
        """Return the positions of one microbatch; ``of`` is the number of microbatches."""
        first = self.start + self.count * microbatch // of
        return range(first, self.start + self.count * (microbatch + 1) // of)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMicrobatch:
    """One microbatch of a step on a rank: its positions, and its weight in the step's mean.

    The weight is 1 if all microbatches are equally large. It is 0 for a stand-in: a rank without
    samples in any microbatch repeats another rank's microbatch without effect, because the
    collectives of the backward pass need it. A rank whose microbatch of a round has no samples does
    the same if another of the round has some.
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
    """Return the work of a rank with the microbatches ``mine`` in a step; never empty.

    Microbatches run in rounds of ``abreast`` at a time, see `shares.part`; the ranks of a round run
    equally many.
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
    """Return the microbatches that run at the same time as this one, including it."""
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
    """Return the weight of a microbatch of ``count`` samples in a mean over all microbatches."""
    return count * microbatches / total


def check_batch(batch: int, *, microbatches: int) -> None:
    """Raise ``ConfigError`` if a step could not give every microbatch a sample."""
    if batch < microbatches:
        raise ConfigError(
            f"run.loader(batch={batch}): a step has {microbatches} microbatches, so it needs at "
            f"least {microbatches} samples; give more, or lower Batch(microbatches=...)"
        )
