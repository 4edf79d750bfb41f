"""Importance ratios between the policy and those that sampled, and their use.

All log-probabilities are [rows, length - 1]; the mask is 1 where a token was sampled.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Correction = Literal["token", "prefix", "sequence", "icepop", "none"]
"""The ratio of the proximal to the behavior policy that weighs a token.

``token``: its own (truncated importance sampling). ``prefix``: its own times the smallest of the
tokens before it, a stand-in for the product over the prefix that does not explode (Lei et al.,
"Prefix Importance Ratio Stabilizes Policy Optimization": MinPRO). ``sequence``: the product over
the whole answer, the same for all of its tokens. ``icepop``: its own inside a band, and 0 outside:
a token on which trainer and engine differ too much, in either direction, is masked (Ling Team,
"Every Step Evolves": IcePop). ``none``: 1, as if the proximal policy had sampled.
"""

_MOST_LOG = 20.0
"""Larger ratios count as e**20: they are truncated anyway, and must stay finite."""


def behavior_weights(
    proximal: Tensor,
    behavior: Tensor,
    mask: Tensor,
    *,
    correction: Correction,
    cap: float,
    band: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Return every token's weight, at most ``cap``; undefined where the mask is 0.

    With ``icepop`` it is 0 outside the ``band``, and not truncated.
    """
    if correction == "none":
        return torch.ones_like(behavior)
    logs = (proximal - behavior) * mask
    if correction == "icepop":
        ratios = logs.clamp(max=_MOST_LOG).exp()
        return ratios * ((ratios >= band[0]) & (ratios <= band[1]))
    if correction == "sequence":
        logs = logs.sum(1, keepdim=True).expand_as(logs)
    elif correction == "prefix":
        logs = logs + _least_before(logs)
    return logs.clamp(max=_MOST_LOG).exp().clamp(max=cap)


def _least_before(logs: Tensor) -> Tensor:
    """Return the smallest value before each column; 0, without effect, where that is above 0."""
    least = logs.cummin(1).values.clamp(max=0.0)
    return torch.cat([torch.zeros_like(least[:, :1]), least[:, :-1]], 1)


def staleness_weights(versions: Tensor, *, step: int, discount: float) -> Tensor:
    """Return ``discount`` to the power of every token's staleness, the steps since its version."""
    return torch.full_like(versions, discount, dtype=torch.float32) ** (step - versions)


def sequence_ratios(current: Tensor, behavior: Tensor, mask: Tensor) -> Tensor:
    """Return each row's probability now divided by that when it was sampled, float64 [rows]."""
    return ((current - behavior) * mask).double().sum(1).clamp(max=_MOST_LOG).exp()


def effective_share(ratios: Tensor) -> float:
    """Return the effective sample size as a share of the samples: 1 when all ratios are equal.

    ``ratios`` [rows] are of sequences (Huang et al., "Stable Asynchrony"); 1 for no rows.
    """
    if not len(ratios):
        return 1.0
    squares = ratios.square().sum()
    return float(ratios.sum().square() / squares / len(ratios)) if squares > 0 else 1.0


def score_norms(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the squared norm of each row's score with respect to the logits, float64 [rows].

    The gradient of a token's log-probability is one at its logit minus the distribution, so its
    squared norm is 1 - 2 p + sum of the squared probabilities. It stands for the norm with respect
    to the parameters, which would take a backward pass for each row.
    """
    table = torch.softmax(logits[:, : tokens.shape[1] - 1], -1)
    own = table.gather(2, tokens[:, 1:, None])[..., 0]
    return ((1 - 2 * own + table.square().sum(-1)) * mask).double().sum(1)
