"""The response to a loss that is not finite or leaps; every rank decides the same. Pure.

A flipped bit makes the loss wrong once: a roll-back and a repetition of the steps correct it. A bad
batch makes it wrong again: then the update is skipped. Both responses are bounded. (PaLM's authors
rolled back and skipped the batches around a spike by hand: Chowdhery et al., 2022, §5.1.)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Final, Literal

import msgspec

from holdfast.ckpt import checks
from holdfast.elastic.errors import ConfigError

_MAD_TO_DEVIATION = 1.4826
_LEAST_SPREAD = 0.02

Response = Literal["warn", "skip", "rollback", "stop"]


class LossAction(StrEnum):
    """The action taken for a step after its loss was judged."""

    GO_ON = "go_on"
    WARN = "warn"
    SKIP = "skip"
    ROLL_BACK = "rollback"
    STOP = "stop"


_RESPONSE: Final = checks.one_of("warn", "skip", "rollback", "stop")
_RULES: Final[Mapping[str, checks.Rule]] = {
    "metric": checks.text(remedy="give the name that run.log is called with"),
    "nonfinite": _RESPONSE,
    "spike": _RESPONSE,
    "then": checks.one_of("skip", "stop"),
    "factor": checks.number(
        0, sys.float_info.max, above=True, remedy="give a positive number that is finite"
    ),
    "window": checks.count(2, remedy="give 2 or more steps"),
    "warmup": checks.count(2, remedy="give 2 or more steps; a spread needs them"),
    "steps_back": checks.count(0, remedy="give 0 or more"),
    "limit": checks.count(0, remedy="give 0 or more"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGuard:
    """A guard on a metric that the loop logs in its microbatches, ``"loss"`` by default.

    ``nonfinite`` is the response to a value that is NaN or infinite. ``spike`` is the response to a
    value more than ``factor`` robust deviations above the median of the last ``window`` steps (not
    before ``warmup`` steps). Responses: ``"warn"``; ``"skip"``: the step does not change the
    weights; ``"rollback"``: go back ``steps_back`` steps, or more if no snapshot is that near, and
    repeat them; ``"stop"``: end the job. The run rolls back at most ``limit`` times to get past a
    step, then the response ``then`` follows. At most ``limit`` steps in a row are skipped, then the
    job ends.
    """

    metric: str = "loss"
    nonfinite: Response = "rollback"
    spike: Response = "warn"
    then: Literal["skip", "stop"] = "stop"
    factor: float = 10.0
    window: int = 64
    warmup: int = 20
    steps_back: int = 1
    limit: int = 2

    def __post_init__(self) -> None:
        checks.check_fields(self, _RULES, error=ConfigError)
        if self.window < self.warmup:
            raise ConfigError(
                f"LossGuard(window={self.window}, warmup={self.warmup}): the window must be at "
                "least as long as the warm-up"
            )

    @property
    def rolls_back(self) -> bool:
        """True if a response may roll back."""
        return "rollback" in (self.nonfinite, self.spike)


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's memory: the accepted losses by step, the worst step, and the counts of responses.

    It outlives generations but is not part of the run's state: a roll-back must not erase the count
    of roll-backs.
    """

    losses: dict[int, float] = {}
    worst_step: int = -1
    rollbacks: int = 0
    skipped: int = 0

    @property
    def knowledge(self) -> tuple[int, int, int]:
        """Return a sort key: ranks that joined late know less."""
        return self.worst_step, self.rollbacks, len(self.losses)


def longest(pasts: Collection[Past], *, before: int) -> Past:
    """Return the oldest rank's memory, which all ranks share at ``before`` complete steps."""
    known = max(pasts, key=lambda past: past.knowledge)
    losses = {step: loss for step, loss in known.losses.items() if step < before}
    return msgspec.structs.replace(known, losses=losses)


def judge(loss: float, losses: Collection[float], *, guard: LossGuard) -> str:
    """Return the fault of a loss that follows ``losses``; empty if there is none."""
    if not math.isfinite(loss):
        return f"{guard.metric} is {loss}"
    if len(losses) < guard.warmup:
        return ""
    middle = median(losses)
    spread = _MAD_TO_DEVIATION * median([abs(each - middle) for each in losses])
    bound = middle + guard.factor * max(spread, _LEAST_SPREAD * abs(middle))
    if loss <= bound:
        return ""
    return f"{guard.metric} leapt to {loss:.4g} from a median of {middle:.4g} (limit {bound:.4g})"


def decide(
    loss: float,
    past: Past,
    *,
    step: int,
    guard: LossGuard,
    wrong: str = "",
    is_done: bool = False,
) -> tuple[LossAction, str, Past]:
    """Return the action for step ``step``, the reason, and the new memory.

    ``wrong`` names another value that is not finite, such as a gradient. ``is_done``: the step has
    changed the weights, and these cannot be used: they go back, or the job ends.
    """
    why = wrong or judge(loss, list(past.losses.values()), guard=guard)
    if not why:
        return LossAction.GO_ON, "", _accepted(past, step, loss, guard=guard)
    response = guard.nonfinite if wrong or not math.isfinite(loss) else guard.spike
    tries = past.rollbacks if step <= past.worst_step else 0
    if response == "rollback" and tries >= guard.limit:
        response = guard.then
        why = f"{why}, again after going back {tries} times"
    if response == "skip" and past.skipped >= guard.limit:
        response = "stop"
        why = f"{why}, after {past.skipped} steps in a row were left out"
    if is_done and response in ("warn", "skip"):
        why = f"{why}; the step has changed the weights, and cannot be left out any more"
        response = "stop"
    worst = max(step, past.worst_step)
    match response:
        case "rollback":
            past = msgspec.structs.replace(past, worst_step=worst, rollbacks=tries + 1)
            return LossAction.ROLL_BACK, why, past
        case "skip":
            past = msgspec.structs.replace(past, worst_step=worst, skipped=past.skipped + 1)
            return LossAction.SKIP, why, past
        case "stop":
            return LossAction.STOP, why, past
        case _:
            known = _accepted(past, step, loss, guard=guard) if math.isfinite(loss) else past
            return LossAction.WARN, why, known  # so a new level of the loss is learned


def _accepted(past: Past, step: int, loss: float, *, guard: LossGuard) -> Past:
    losses = {**past.losses, step: loss}
    for old in sorted(losses)[: -guard.window]:
        del losses[old]
    if step < past.worst_step:  # repeating steps up to the worst one
        return msgspec.structs.replace(past, losses=losses)
    return msgspec.structs.replace(past, losses=losses, skipped=0, rollbacks=0)


def value_of(metrics: Mapping[str, float], *, guard: LossGuard) -> float:
    """Return the watched metric. Raises ``ConfigError`` if the loop does not log it."""
    if guard.metric not in metrics:
        raise ConfigError(
            f"LossGuard watches {guard.metric!r}, which no microbatch of the step logged: call "
            f"run.log({guard.metric}=...) inside the loop over run.microbatches"
        )
    return metrics[guard.metric]
