"""The evaluations of one `Run.minimize`: the mean loss of each, and what is kept of the first."""

from __future__ import annotations

import torch

from holdfast.ckpt.errors import InternalError
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.metrics import Metrics
from holdfast.elastic.gradients.summing import Reducer

_LOSS = "loss"


class UpdateSkippedError(InternalError):
    """The loss guard leaves the update out: leave the optimizer before it changes anything."""


class Evaluations:
    """The losses that an optimizer sees in one update.

    ``first`` is that of the first evaluation, None before its end. ``logged`` holds the metrics
    that were logged in it: those of the weights before the update, as in any other step.
    """

    def __init__(self, microbatches: int) -> None:
        self._losses = Metrics(microbatches)
        self.first: float | None = None
        self.logged: dict[str, float] = {}

    def add(self, microbatch: int, loss: torch.Tensor, *, counts: float) -> None:
        """Add the loss of a microbatch."""
        self._losses.add(microbatch, {_LOSS: loss}, counts=counts)

    def end_pass(self, reducer: Reducer, *, speaks: bool, logged: dict[str, float]) -> None:
        """Average the losses over all ranks' microbatches, in their order; collective."""
        self._losses.end_pass(reducer, speaks=speaks)
        if self.first is None:
            self.first, self.logged = self._losses.latest[_LOSS], dict(logged)

    @property
    def first_loss(self) -> float:
        """The mean loss of the first evaluation. Raises ``ConfigError`` if there was none."""
        if self.first is None:
            raise ConfigError("run.minimize: the optimizer did not call its closure")
        return self.first

    @property
    def loss(self) -> torch.Tensor:
        """The mean loss of the last evaluation: float64, without dims, on the CPU."""
        return torch.tensor(self._losses.latest[_LOSS], dtype=torch.float64)
