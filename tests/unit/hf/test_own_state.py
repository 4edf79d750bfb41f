"""Attributes of a script's own Trainer that change while a batch is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from adapter_packages import needs

from holdfast.elastic import ConfigError

pytestmark = needs("transformers", "accelerate")


def made() -> Any:
    from transformers import Trainer

    class OwnLoss(Trainer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.count, self.losses = 1000, [1.0]
            self.by_name: dict[str, list[float]] = {"a": [1.0]}
            self.total, self.rows = torch.zeros(2), np.zeros(2)
            self._metrics = {"eval": {"a": [1.0]}}

    return OwnLoss()


def counted(trainer: Any) -> None:
    trainer.count += 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "count": counted,
    "losses": lambda trainer: trainer.losses.append(2.0),
    "by_name": lambda trainer: trainer.by_name["a"].append(2.0),
    "total": lambda trainer: trainer.total.add_(1),
    "rows": lambda trainer: trainer.rows.__iadd__(1),
    "newest": lambda trainer: setattr(trainer, "newest", 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_refused_by_name(name: str) -> None:
    from holdfast.adapters.hf.own_state import OwnState

    trainer = made()
    watch = OwnState(trainer)
    said = rf"OwnLoss changes self\.{name} while.*divide_evaluation=False"
    with pytest.raises(ConfigError, match=said), watch.unchanged():
        CHANGES[name](trainer)


def test_metrics_of_libraries_and_equal_values_are_no_change() -> None:
    from holdfast.adapters.hf.own_state import OwnState

    trainer = made()
    with OwnState(trainer).unchanged():
        trainer._metrics["eval"]["a"].append(2.0)
        trainer.count = trainer.count + 1 - 1
        trainer.losses = list(trainer.losses)


def test_trainers_of_libraries_are_not_looked_at() -> None:
    from transformers import Trainer

    from holdfast.adapters.hf.own_state import OwnState

    trainer = Trainer.__new__(Trainer)
    with OwnState(trainer).unchanged():
        trainer.anything = 1
