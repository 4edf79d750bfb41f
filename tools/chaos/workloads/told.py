"""A step of a small model that reports its samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from holdfast import elastic
from holdfast.tools import chaos

SAMPLES = 4096


def numbered_rows() -> list[tuple[int, torch.Tensor]]:
    """Return the samples, each with its number."""
    rows = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(3))
    return list(enumerate(rows))


def train_step(
    run: elastic.Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[tuple[int, torch.Tensor]],
    *,
    step: int,
    **line: int,
) -> None:
    """Make step ``step``, and report its samples with ``line``."""
    ids: set[int] = set()  # a pass over the microbatches may be repeated
    for numbers, batch in run.microbatches(data):
        ids.update(numbers.tolist())
        run.backward((model(batch).squeeze(-1) - batch.sum(-1)).square().mean())
    chaos.samples(step + 1, sorted(ids), **line)  # Holdfast counts complete steps
    run.step(optimizer)
