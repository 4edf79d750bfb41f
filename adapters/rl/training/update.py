"""A step's advantages, learning rate and loss, computed from its batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.loss.advantages import group_advantages
from holdfast.adapters.rl.loss.batch import TrainingBatch
from holdfast.adapters.rl.loss.divergence import answer_divergences
from holdfast.adapters.rl.loss.ppo import policy_loss, target_logprobs
from holdfast.adapters.rl.loss.ratios import effective_share
from holdfast.adapters.rl.training.survey import Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A step's ``batch`` with its advantages, and the ``lr`` to train it with.

    ``share`` is the effective share of samples, None without a survey; ``proximal`` and
    ``reference`` [rows, length - 1] are the log-probabilities of a proximal policy and of the
    reference of a penalty in the loss, None without one. ``divergence`` from the reference is the
    mean over the answers, None without one.
    """

    step: int
    batch: TrainingBatch
    lr: float
    share: float | None = None
    proximal: Tensor | None = None
    reference: Tensor | None = None
    divergence: float | None = None

    @classmethod
    def of(
        cls, batch: TrainingBatch, found: Survey | None, *, config: RLConfig, step: int
    ) -> Update:
        """Create the update of a batch with rewards and its survey ``found``."""
        used, loss = batch.used, config.loss
        rewards, divergence = batch.rewards[used], None
        reference = found.reference if found else None
        if loss.kl is not None and reference is not None:
            diverged = answer_divergences(reference, batch.behavior, batch.mask)[used]
            divergence = diverged.sum().item() / max(1, int(batch.spoken.sum()))
            if loss.kl.as_reward:
                rewards = rewards - (loss.kl.weight * diverged).float()
                reference = None
        advantages = group_advantages(
            rewards,
            config.group,
            baseline=loss.baseline,
            normalize=loss.normalize,
            variances=found.variances[used].float() if found else None,
        )
        share = effective_share(found.ratios[batch.spoken]) if found else None
        lr = config.lr * min(1.0, (step + 1) / config.lr_warmup_steps)
        return cls(
            step=step,
            batch=batch.with_advantages(advantages),
            lr=lr * math.sqrt(share) if loss.ess_lr and share is not None else lr,
            share=share,
            proximal=found.proximal if found else None,
            reference=reference,
            divergence=divergence,
        )

    def loss(self, model: nn.Module, *, config: RLConfig, index: int = 0, of: int = 1) -> Tensor:
        """Return the loss of part ``index`` of ``of``; the mean over the parts is the batch's."""
        part = self.batch.part(index, of=of)
        return policy_loss(
            target_logprobs(model(part.tokens), part.tokens),
            part,
            config=config.loss,
            step=self.step,
            scale=of / max(1, config.loss.units(self.batch)),
            proximal=None if self.proximal is None else self.proximal.chunk(of)[index],
            reference=None if self.reference is None else self.reference.chunk(of)[index],
        )

    def set_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the learning rate of ``optimizer`` to this update's."""
        for group in optimizer.param_groups:
            group["lr"] = self.lr


def make_optimizer(parameters: Iterable[nn.Parameter], *, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of the policy."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
