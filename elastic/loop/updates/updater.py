"""The updates that a training function makes: `Run.step` and `Run.minimize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from holdfast.elastic.config import Settings
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.whole_tensors import whole_updates
from holdfast.elastic.loop.updates.evaluations import Evaluations, UpdateSkippedError
from holdfast.elastic.loop.updates.place import LoopPlace
from holdfast.elastic.loop.updates.watch import UpdateWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater:
    """Makes one generation's updates; each ends a phase and drops the gradients.

    ``check`` raises if the generation is over. ``clear`` drops all gradients. ``fence`` is called
    for each optimizer before it steps. ``agree`` is as for `ScalerWatch.apply`.
    """

    watch: UpdateWatch
    place: LoopPlace
    settings: Settings
    check: Callable[[], None]
    clear: Callable[[], None]
    fence: Callable[[Any], None]
    agree: Callable[[torch.Tensor], None]

    def step(self, optimizers: Sequence[Optimizer], *, scaler: GradScaler | None) -> None:
        """Apply the mean gradient with all ``optimizers``; see `Run.step`."""
        if self.place.evaluations is not None:
            raise ConfigError("run.step inside run.minimize: the optimizer steps by itself there")
        if not self.place.has_gradients:
            self.watch.refuse_second()
        self.check()
        with whole_updates(optimizers, exact=self.settings.exact):
            self.watch.apply(
                optimizers,
                scaler=scaler,
                skips=self.place.skips,
                fence=self.fence,  # tracked ones are fenced already
                agree=self.agree,
            )
        self._end()

    def minimize(self, optimizer: Optimizer, closure: Callable[[], object]) -> Evaluations:
        """Update with an optimizer that evaluates the loss by itself; see `Run.minimize`."""
        place = self.place
        if not place.in_step or place.has_gradients or place.evaluations is not None:
            raise ConfigError(
                "run.minimize makes its own pass and update: call it inside `for step in "
                "run.steps(...)`, alone, not after a pass with run.backward or in a closure"
            )
        self.check()
        place.evaluations = evaluations = Evaluations(self.settings.batch.microbatches)

        def evaluate() -> torch.Tensor:
            self.clear()
            place.has_gradients = False
            with torch.enable_grad():
                closure()
            if not place.has_gradients:
                raise ConfigError(
                    "the closure of run.minimize made no pass over run.microbatches with "
                    "run.backward: both belong inside it"
                )
            if place.skips:
                raise UpdateSkippedError
            self.watch.evaluated(optimizer)
            return evaluations.loss

        try:
            self.watch.minimize(optimizer, evaluate, fence=self.fence)
        finally:
            place.evaluations = None
        self._end()
        return evaluations

    def _end(self) -> None:
        self.clear()
        self.place.begin_phase()
