"""The guard of the loss in one process, through all its generations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec

from holdfast.elastic.errors import JobFailedError, RollBackError
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.loss import LossAction, LossGuard, Past, decide, longest, value_of

_log = logging.getLogger(__name__)


class LossWatch:
    """Judges every step's loss. All ranks decide the same, from the same metrics and memory."""

    def __init__(self, guard: LossGuard) -> None:
        self._guard, self._past = guard, Past()

    def begin(self, world: GenerationWorld, *, completed: int) -> None:
        """Take over the memory of the rank that has watched the longest; collective."""
        said = world.gather(msgspec.to_builtins(self._past, str_keys=True))
        pasts = [msgspec.convert(each, Past, str_keys=True) for each in said]
        self._past = longest(pasts, before=completed)

    def skips(
        self,
        metrics: Mapping[str, float],
        *,
        step: int,
        wrong: str,
        is_done: bool = False,
        tell: Callable[[str, LossAction], None],
    ) -> bool:
        """Return whether the step must not change the weights.

        ``wrong`` and ``is_done`` are as in `loss.decide`. ``tell`` is called with the fault and the
        action. Raises ``RollBackError`` to roll back, ``JobFailedError`` to end the job, and
        ``ConfigError`` if the loop does not log the metric.
        """
        guard = self._guard
        loss = value_of(metrics, guard=guard)
        action, why, self._past = decide(
            loss, self._past, step=step, guard=guard, wrong=wrong, is_done=is_done
        )
        if not why:
            return False
        tell(why, action)
        message = f"step {step}: {why}"
        match action:
            case LossAction.ROLL_BACK:
                raise RollBackError(message, at_most=max(0, step - guard.steps_back))
            case LossAction.STOP:
                raise JobFailedError(
                    f"{message}: look at the data and the learning rate, or change what "
                    f"LossGuard(nonfinite={guard.nonfinite!r}, spike={guard.spike!r}, "
                    f"then={guard.then!r}, limit={guard.limit}) does"
                )
        _log.warning("%s: %s", message, "left out" if action is LossAction.SKIP else "noted")
        return action is LossAction.SKIP
