"""Bugs of runs that train one policy each, found by small runs that die, go back and are lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

from doubles.cast_runs import CastJob

from holdfast.adapters.rl.cast.part import CastPart
from holdfast.adapters.rl.cast.step_log import StepLog
from holdfast.adapters.rl.samples.trajectory import Trajectory
from mutants.bug import Bug


def trial(seed: int) -> str:
    """Run the runs of a seed; return the first thing that is wrong with them, or ""."""
    return "; ".join(CastJob(random.Random(f"planted cast {seed}")).play()[:1])


# -- the bugs --------------------------------------------------------------------------------------


def _trains_the_last_step_again(real: Callable[[CastPart, int], bool]) -> Any:
    """Have a run that came back take the groups before those of its step."""

    def take(self: Any, step: int) -> bool:
        is_first = self._by < 0 < step
        return real(self, step - 1 if is_first else step)

    return take


def _asks_only_those_that_it_sees(real: Callable[..., int]) -> Any:
    def forgettable(keeps: Collection[int | None], *, end: int) -> int:
        return real([each for each in keeps if each is not None], end=end)

    return forgettable


def _counts_on_the_newest_checkpoint(real: Callable[..., int]) -> Any:
    def kept_from(*, protected: int, durable: int | None, every: int) -> int:
        return real(protected=protected, durable=durable, every=0)

    return kept_from


def _counts_on_memory(real: Callable[..., int]) -> Any:
    def kept_from(*, protected: int, durable: int | None, every: int) -> int:
        return real(protected=protected, durable=None, every=every)

    return kept_from


def _writes_one_half_first(real: Callable[..., None]) -> Any:
    """Write the groups of a step in two pieces, as if a file could be seen while it grows."""

    def publish(self: StepLog, step: int, groups: Sequence[Trajectory]) -> None:
        real(self, step, groups[: len(groups) // 2])
        self.store.delete([f"steps/{step:012d}"])
        real(self, step, groups)

    return publish


def _samples_all_again(real: Callable[[CastPart, int], None]) -> Any:
    """Have a lead that went back sample the steps that the log has."""

    def fill(self: Any, step: int) -> None:
        self._filled = self._end
        real(self, step)

    return fill


def _keeps_the_generations(_real: Any) -> Any:
    def resampled(groups: Sequence[Trajectory], *, generation: int) -> tuple[Trajectory, ...]:
        return tuple(groups)

    return resampled


def _begins_anywhere(real: Any) -> Any:
    return lambda completed, *, first, end: ""


def _bug(name: str, about: str, where: str, broken: Callable[[Any], Any], seed: int) -> Bug:
    place = f"holdfast.adapters.rl.cast.{where}"
    return Bug(name=name, about=about, where=place, broken=broken, trial="cast", seed=seed)


BUGS = (
    _bug(
        "groups-again",
        "a run that came back takes the groups before those of its step",
        "part:CastPart._take",
        _trains_the_last_step_again,
        0,
    ),
    _bug(
        "unseen-run-forgotten",
        "the log forgets groups although a run was not seen yet",
        "rules:forgettable",
        _asks_only_those_that_it_sees,
        22,
    ),
    _bug(
        "older-checkpoint-forgotten",
        "the log forgets the groups since the checkpoint before the newest one",
        "rules:kept_from",
        _counts_on_the_newest_checkpoint,
        11,
    ),
    _bug(
        "checkpoint-forgotten",
        "the log forgets groups that are protected, and in no checkpoint yet",
        "rules:kept_from",
        _counts_on_memory,
        1,
    ),
    _bug(
        "half-published",
        "others see a step in the log before all of its groups are there",
        "step_log:StepLog.publish",
        _writes_one_half_first,
        7,
    ),
    _bug(
        "sampled-again",
        "a lead that went back samples the steps that the log has",
        "part:CastPart._fill",
        _samples_all_again,
        1,
    ),
    _bug(
        "stamps-kept",
        "groups of the log keep the generations in which they were sampled",
        "step_log:resampled",
        _keeps_the_generations,
        4,
    ),
    _bug(
        "begun-anywhere",
        "a run begins where its groups are gone",
        "rules:misfit",
        _begins_anywhere,
        55,
    ),
)
