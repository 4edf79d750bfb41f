"""Advantages of samples: their rewards relative to their group's."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["mean", "median", "minimum_variance"]
"""The baseline that is subtracted from the rewards of a group.

``mean``: GRPO (Shao et al., "DeepSeekMath"). ``median``: MC-GRPO (Kim, "Median-Centered Group
Relative Policy Optimization"), for small groups, where one outlier can flip the sign of advantages
around the mean; an odd ``group`` has a sample of advantage zero, which costs no learning signal.
``minimum_variance``: the baseline that minimizes the variance of the off-policy gradient, in closed
form (Huang et al., "Stable Asynchrony": OPOB).
"""

_LEAST_DEVIATION = 1e-4


def group_advantages(
    rewards: Tensor,
    group: int,
    *,
    baseline: Baseline = "mean",
    normalize: bool = True,
    variances: Tensor | None = None,
) -> Tensor:
    """Return each sample's reward minus its group's baseline.

    ``rewards`` [rows] holds the groups of ``group`` samples one after another; with ``normalize``
    the result is in units of the group's standard deviation. ``variances`` [rows], for
    ``minimum_variance``, are what a unit of advantage adds to the variance of the gradient: the
    squared importance ratio times the squared norm of the score.
    """
    table = rewards.view(-1, group)
    if baseline == "median":
        centre = table.quantile(0.5, dim=1, keepdim=True)
    elif baseline == "minimum_variance":
        if variances is None:
            raise ValueError("a minimum-variance baseline needs the variances of the samples")
        centre = _weighted_mean(table, variances.view(-1, group))
    else:
        centre = table.mean(1, keepdim=True)
    centred = table - centre
    if normalize:
        centred = centred / (table.std(1, keepdim=True) + _LEAST_DEVIATION)
    return centred.flatten()


def _weighted_mean(table: Tensor, weights: Tensor) -> Tensor:
    """Return the rows' weighted means; the plain mean where all weights of a row are zero."""
    total = weights.sum(1, keepdim=True)
    weighted = (weights * table).sum(1, keepdim=True) / torch.where(total > 0, total, 1.0)
    return torch.where(total > 0, weighted, table.mean(1, keepdim=True))
