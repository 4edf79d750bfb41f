"""The evaluations of one update: their losses, and the metrics of the first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.updates.evaluations import Evaluations


class Alone:
    """A world of one."""

    def max_(self, tensor: torch.Tensor) -> None: ...

    def sum_(self, tensor: torch.Tensor) -> None: ...

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        return lambda: None


def evaluate(evaluations: Evaluations, *losses: float, logged: dict[str, float]) -> None:
    for microbatch, loss in enumerate(losses):
        evaluations.add(microbatch, torch.tensor(loss), counts=1 + microbatch)
    evaluations.end_pass(Alone(), speaks=True, logged=logged)


def test_the_first_loss_and_its_metrics_are_kept_and_the_last_is_the_optimizers() -> None:
    found = Evaluations(2)
    logged = {"loss": 1.0}
    evaluate(found, 3.0, 6.0, logged=logged)
    logged["loss"] = 9.0
    evaluate(found, 1.0, 1.0, logged=logged)
    assert found.first_loss == 5.0, "weighted by samples"
    assert found.logged == {"loss": 1.0}
    assert (found.loss.dtype, found.loss.item()) == (torch.float64, 1.0)


def test_an_optimizer_without_an_evaluation_is_refused() -> None:
    with pytest.raises(ConfigError, match="did not call its closure"):
        _ = Evaluations(2).first_loss
