"""Weights of a step's microbatches that the caller finds in their contents, such as label tokens.

The weight of a microbatch in the mean depends on those of all others. So every rank weighs its
microbatches before the first forward, and one sum over the ranks tells all of them the total.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from holdfast.elastic.data.loaders import LoadedMicrobatch
from holdfast.elastic.errors import ConfigError

Weigh: TypeAlias = Callable[[Any], "float | torch.Tensor"]
"""Returns what a microbatch counts in the step's means: a number, 0 or more."""


def weighed(
    pieces: Sequence[LoadedMicrobatch],
    weigh: Weigh,
    *,
    microbatches: int,
    add: Callable[[torch.Tensor], None],
) -> list[LoadedMicrobatch]:
    """Return this rank's microbatches with the weights that ``weigh`` finds; collective.

    ``microbatches`` is their number in the step. ``add`` sums a tensor over the ranks that run
    other microbatches. A stand-in keeps its weight of 0. Raises ``ConfigError`` for a weight that
    is none, and on all ranks if all weights are 0.
    """
    batches = [piece.fetch() for piece in pieces]
    table = torch.zeros(microbatches, dtype=torch.float64)
    for piece, batch in zip(pieces, batches, strict=True):
        if piece.samples:
            table[piece.microbatch] = _checked(weigh(batch), piece.microbatch)
    add(table)
    weights: list[float] = table.tolist()
    total = sum(weights)
    if not total:
        raise ConfigError(
            "run.microbatches(weigh=...) returned 0 for every microbatch of the step, so it has no "
            "mean: leave samples without labels out of the data set, or give larger batches"
        )
    return [
        replace(
            piece,
            fetch=functools.partial(_itself, batch),
            weight=weights[piece.microbatch] * microbatches / total if piece.samples else 0.0,
            found=weights[piece.microbatch] if piece.samples else 0.0,
        )
        for piece, batch in zip(pieces, batches, strict=True)
    ]


def _checked(weight: object, microbatch: int) -> float:
    try:
        found = float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if not 0.0 <= found < math.inf:
        raise ConfigError(
            f"run.microbatches(weigh=...) returned {weight!r} for microbatch {microbatch}: give a "
            "finite number, 0 or more, such as the number of label tokens"
        )
    return found


def _itself(batch: Any) -> Any:
    return batch
