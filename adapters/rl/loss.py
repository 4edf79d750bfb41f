"""GRPO advantages and the token-level decoupled PPO loss."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from adapters.rl.batch import Batch


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy ratio is clipped to [1 - clip_low, 1 + clip_high] (clip-higher, DAPO); the weight
    of the proximal over the behavior policy is truncated at ``behavior_cap`` (decoupled PPO)."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    behavior_cap: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"clip_low is {self.clip_low}, needed: between 0 and 1")
        if self.clip_high <= 0:
            raise ValueError(f"clip_high is {self.clip_high}, needed: above 0")
        if self.behavior_cap < 1:
            raise ValueError(f"behavior_cap is {self.behavior_cap}, needed: at least 1")


def group_advantages(rewards: Tensor, group: int) -> Tensor:
    """Return each sample's reward less its group's mean, in units of the group's deviation.

    ``rewards`` [rows] holds the groups of ``group`` samples one after another.
    """
    table = rewards.view(-1, group)
    centred = table - table.mean(1, keepdim=True)
    return (centred / (table.std(1, keepdim=True) + 1e-4)).flatten()


def target_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of every token but the first: [rows, length - 1]."""
    table = torch.log_softmax(logits[:, : tokens.shape[1] - 1], -1)
    return table.gather(2, tokens[:, 1:, None])[..., 0]


def policy_loss(
    logprobs: Tensor,
    batch: Batch,
    *,
    config: LossConfig,
    scale: float,
    proximal: Tensor | None = None,
) -> Tensor:
    """Return the loss summed over the batch's sampled tokens, times ``scale``.

    ``proximal`` are the log-probabilities at the start of the step; None takes the current ones,
    right when the step is the first since then. For a microbatch, ``scale`` = microbatches /
    tokens of the whole batch makes the mean over microbatches the mean over the batch's tokens.
    """
    anchor = logprobs.detach() if proximal is None else proximal
    behavior_weight = (anchor - batch.behavior).exp().clamp(max=config.behavior_cap)
    ratio = (logprobs - anchor).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    advantage = batch.advantages[:, None]
    objective = behavior_weight * torch.min(ratio * advantage, clipped * advantage)
    return -(objective * batch.mask).sum() * scale
