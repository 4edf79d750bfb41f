"""The token-level decoupled PPO loss and its settings."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch
from torch import Tensor

from holdfast.adapters.rl.loss.advantages import Baseline
from holdfast.adapters.rl.loss.batch import TrainingBatch
from holdfast.adapters.rl.loss.ratios import Correction, behavior_weights, staleness_weights

Proximal = Literal["current", "ewma", "recomputed"]
"""The proximal policy: the one that the clipped ratio refers to.

``current``: the policy at the start of the step. ``ewma``: a running mean of the weights, for when
the weights that sampled are not available (Hilton et al., "Batch size-invariance for policy
optimization": PPO-EWMA). ``recomputed``: the trainer's own log-probabilities under the very
versions that sampled, from the kept snapshots (Guan et al., "Missing Old Logits in Asynchronous
Agentic RL").
"""


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the loss.

    The policy ratio is clipped to [1 - clip_low, 1 + clip_high] (clip-higher, DAPO); the weight of
    the proximal over the behavior policy is truncated at ``behavior_cap`` (decoupled PPO).
    ``ewma_decay`` is that of the proximal policy ``ewma``. A token's weight falls by the factor
    ``staleness_discount`` with each step between its version and the policy. With ``ess_lr`` the
    learning rate is scaled by the root of the batch's effective share of samples (Huang et al.,
    "Stable Asynchrony").
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    behavior_cap: float = 2.0
    baseline: Baseline = "mean"
    normalize: bool = True
    correction: Correction = "token"
    proximal: Proximal = "current"
    ewma_decay: float = 0.8
    staleness_discount: float = 1.0
    ess_lr: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"clip_low is {self.clip_low}, needed: between 0 and 1")
        if self.clip_high <= 0:
            raise ValueError(f"clip_high is {self.clip_high}, needed: above 0")
        if self.behavior_cap < 1:
            raise ValueError(f"behavior_cap is {self.behavior_cap}, needed: at least 1")
        if not 0 <= self.ewma_decay < 1:
            raise ValueError(f"ewma_decay is {self.ewma_decay}, needed: from 0 to below 1")
        if not 0 < self.staleness_discount <= 1:
            raise ValueError(
                f"staleness_discount is {self.staleness_discount}, needed: above 0, at most 1"
            )

    @property
    def surveys(self) -> bool:
        """True if a step needs an extra pass over its whole batch beforehand."""
        return self.ess_lr or self.baseline == "minimum_variance" or self.proximal != "current"


def target_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of every token but the first: [rows, length - 1]."""
    table = torch.log_softmax(logits[:, : tokens.shape[1] - 1], -1)
    return table.gather(2, tokens[:, 1:, None])[..., 0]


def policy_loss(
    logprobs: Tensor,
    batch: TrainingBatch,
    *,
    config: LossConfig,
    step: int,
    scale: float,
    proximal: Tensor | None = None,
) -> Tensor:
    """Return the loss of ``step`` summed over the batch's sampled tokens, times ``scale``.

    ``proximal`` are the log-probabilities under the proximal policy; None takes the current ones,
    which is right for the policy at the start of the step. For a microbatch, ``scale`` =
    microbatches / tokens of the whole batch makes the mean over microbatches the mean over the
    batch's tokens.
    """
    anchor = logprobs.detach() if proximal is None else proximal
    weight = behavior_weights(
        anchor,
        batch.behavior,
        batch.mask,
        correction=config.correction,
        cap=config.behavior_cap,
    )
    if config.staleness_discount < 1:
        weight = weight * staleness_weights(
            batch.versions, step=step, discount=config.staleness_discount
        )
    ratio = (logprobs - anchor).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    advantage = batch.advantages[:, None]
    objective = weight * torch.min(ratio * advantage, clipped * advantage)
    return -(objective * batch.mask).sum() * scale
