"""The objectives: the terms that sampled tokens contribute, before they are weighed and added up.

All tensors of tokens are [rows, length - 1]; the mask is 1 where a token was sampled.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Objective = Literal["ppo", "gspo", "cispo"]
"""The use of the ratio of the policy to the proximal policy.

``ppo``: every token's own ratio, clipped (Schulman et al., "Proximal Policy Optimization
Algorithms"). ``gspo``: one ratio for the whole answer, the geometric mean of its tokens', clipped;
the loss is the mean over answers (Zheng et al., "Group Sequence Policy Optimization"). ``cispo``:
the clipped ratio is a constant factor of the log-probability, so that no token loses its gradient
(MiniMax, "MiniMax-M1").
"""


def objective_terms(
    logprobs: Tensor,
    anchor: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    objective: Objective,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Return the term of every token; those of an answer are equal with ``gspo``.

    ``anchor`` are the log-probabilities under the proximal policy; ``advantages`` is [rows, 1]. The
    ratio is clipped to [1 - ``clip_low``, 1 + ``clip_high``].
    """
    logs = logprobs - anchor
    if objective == "gspo":
        logs = ((logs * mask).sum(1, keepdim=True) / _lengths(mask)).expand_as(logs)
    ratio = logs.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if objective == "cispo":
        return clipped.detach() * advantages * logprobs
    return torch.min(ratio * advantages, clipped * advantages)


def token_shares(mask: Tensor, objective: Objective) -> Tensor:
    """Return the share of every token in the sum: that of its answer with ``gspo``, else 1."""
    return mask / _lengths(mask) if objective == "gspo" else mask


def _lengths(mask: Tensor) -> Tensor:
    """Return the number of sampled tokens of each row, at least 1: [rows, 1]."""
    return mask.sum(1, keepdim=True).clamp(min=1.0)
