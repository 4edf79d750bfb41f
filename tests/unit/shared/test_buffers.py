"""Buffers become those of rank 0 where DDP would make them so, and are compared elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.adapters.shared import buffers
from holdfast.ckpt import StateError


class OtherRank:
    """A world of two ranks, of which the other one has ``theirs`` as checksums."""

    def __init__(self, theirs: dict[str, int] | None) -> None:
        self.size, self._theirs = 2, theirs

    def gather(self, mine: dict[str, int]) -> list[dict[str, int]]:
        return [mine, mine if self._theirs is None else self._theirs]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the buffers that rank 0 gives to the others."""
    found: list[torch.Tensor] = []

    def broadcast(tensor: torch.Tensor, source: int) -> None:
        assert source == 0
        found.append(tensor)

    monkeypatch.setattr(buffers.dist, "broadcast", broadcast)
    return found


def world(monkeypatch: pytest.MonkeyPatch, theirs: dict[str, int] | None) -> Any:
    monkeypatch.setattr(buffers, "RankWorld", lambda: OtherRank(theirs))


def test_equal_buffers_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, given: list[torch.Tensor]
) -> None:
    world(monkeypatch, None)
    buffers.settle_buffers({"model": nn.BatchNorm1d(2)})
    assert given == []


def test_a_buffer_that_differs_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, given: list[torch.Tensor]
) -> None:
    world(monkeypatch, {"model.0.running_mean": 1})
    model = nn.Sequential(nn.BatchNorm1d(2))
    with pytest.raises(StateError, match=r"model\.0\.running_mean: this buffer .*SyncBatchNorm"):
        buffers.settle_buffers({"model": model})


def test_those_of_ddp_are_given_by_rank_0_if_they_are_kept(
    monkeypatch: pytest.MonkeyPatch, given: list[torch.Tensor]
) -> None:
    world(monkeypatch, None)
    model = nn.BatchNorm1d(2)
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    buffers.settle_buffers({"model": model}, is_in_ddp=True)
    assert [id(each) for each in given] == [
        id(each) for each in (model.running_mean, model.running_var, model.num_batches_tracked)
    ]
