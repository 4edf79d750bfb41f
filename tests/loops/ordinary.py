"""An ordinary DataLoader for the plain twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from holdfast.elastic.data.sampler import sample_indices


def shuffled(
    data: Any,
    *,
    batch: int,
    steps: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[Any]:
    """Return a loader that shuffles as ``shuffle=True`` does, but in the order of the run's seed.

    So a twin has the samples of its port, and their losses can be compared.
    """
    order = sample_indices(range(batch * steps), samples=len(data), seed=0)
    return DataLoader(data, batch_size=batch, sampler=order, collate_fn=collate_fn)
