"""Logged values become means over the microbatches that have them, on all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.metrics import Metrics


class Ranks:
    """Two ranks in one process: the second to give its table gets the sum."""

    def __init__(self) -> None:
        self.tables: list[torch.Tensor] = []

    def sum_(self, tensor: torch.Tensor) -> None:
        self.tables.append(tensor.clone())
        if len(self.tables) == 2:
            tensor.copy_(self.tables[0] + self.tables[1])

    def max_(self, tensor: torch.Tensor) -> None: ...

    def start_sum(self, tensor: torch.Tensor) -> Any: ...


def test_a_tensor_that_changes_later_is_logged_as_it_was() -> None:
    logs, total = Metrics(2), torch.zeros(())
    for microbatch in range(2):
        total += 1
        logs.add(microbatch, {"total": total})
    logs.end_pass(Ranks())
    assert logs.latest == {"total": 1.5}


def test_a_value_of_some_microbatches_is_a_mean_over_these() -> None:
    one, other, ranks = Metrics(4), Metrics(4), Ranks()
    one.add(0, {"loss": 1.0})
    other.add(3, {"loss": 3.0, "rare": 7.0})
    assert one.signature() != other.signature()
    said: list[Json] = [["loss"], ["loss", "rare"]]
    for logs in (one, other):
        logs.unite(lambda _: said)
    assert one.signature() == other.signature()
    for logs in (one, other):
        logs.end_pass(ranks)
    assert other.latest == {"loss": 2.0, "rare": 7.0}


def test_a_value_of_a_stand_in_alone_is_no_value() -> None:
    logs = Metrics(2)
    logs.add(1, {"loss": 9.0}, counts=0)
    logs.end_pass(Ranks())
    assert logs.latest == {}


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.ones(3), r"a torch\.float32 tensor of shape \[3\]"),
        (torch.ones((), dtype=torch.complex64), r"a torch\.complex64 tensor of shape \[\]"),
        ("0.5", "a str"),
        ({"a": 1.0}, "a dict"),
        (None, "a NoneType"),
    ],
)
@pytest.mark.parametrize("microbatch", [0, None])
def test_what_is_no_number_is_refused_where_it_is_logged(
    value: Any, what: str, microbatch: int | None
) -> None:
    with pytest.raises(ConfigError, match=rf"run\.log\(loss=\.\.\.\) was given {what}: give a"):
        Metrics(2).add(microbatch, {"loss": value})
