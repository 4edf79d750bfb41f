"""The decoupled policy loss and its settings."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch
from torch import Tensor

from holdfast.adapters.rl.loss.advantages import Baseline
from holdfast.adapters.rl.loss.batch import TrainingBatch
from holdfast.adapters.rl.loss.divergence import KLConfig, divergences
from holdfast.adapters.rl.loss.objectives import Objective, objective_terms, token_shares
from holdfast.adapters.rl.loss.ratios import Correction, behavior_weights, staleness_weights

Proximal = Literal["current", "behavior", "ewma", "recomputed"]
"""The proximal policy: the one that the clipped ratio refers to.

``current``: the policy at the start of the step. ``behavior``: the one that sampled, by its
recorded log-probabilities, so that the clipped ratio is the whole correction (PPO as it was before
it was decoupled). ``ewma``: a running mean of the weights, for when
the weights that sampled are not available (Hilton et al., "Batch size-invariance for policy
optimization": PPO-EWMA). ``recomputed``: the trainer's own log-probabilities under the very
versions that sampled, from the kept snapshots (Guan et al., "Missing Old Logits in Asynchronous
Agentic RL").
"""


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the loss.

    The policy ratio is clipped to [1 - clip_low, 1 + clip_high] (clip-higher, DAPO); the weight of
    the proximal over the behavior policy is truncated at ``behavior_cap`` (decoupled PPO), or, with
    the correction ``icepop``, 0 outside ``icepop_low`` to ``icepop_high``. With ``kl`` the policy
    is kept near a reference. ``ewma_decay`` is that of the proximal policy ``ewma``. A token's
    weight falls by the factor ``staleness_discount`` with each step between its version and the
    policy. With ``ess_lr`` the learning rate is scaled by the root of the batch's effective share
    of samples (Huang et al., "Stable Asynchrony").
    """

    objective: Objective = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    behavior_cap: float = 2.0
    baseline: Baseline = "mean"
    normalize: bool = True
    correction: Correction = "token"
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    proximal: Proximal = "current"
    ewma_decay: float = 0.8
    staleness_discount: float = 1.0
    ess_lr: bool = False
    kl: KLConfig | None = None

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"clip_low is {self.clip_low}, needed: above 0, at most 1")
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
        if not 0 < self.icepop_low <= 1:
            raise ValueError(f"icepop_low is {self.icepop_low}, needed: above 0, at most 1")
        if not 1 <= self.icepop_high < float("inf"):
            raise ValueError(f"icepop_high is {self.icepop_high}, needed: at least 1")
        self._check_policies()

    def _check_policies(self) -> None:
        """Raise ``ValueError`` for an objective or a correction that would have no effect."""
        if self.proximal == "behavior" and self.correction not in ("token", "none"):
            raise ValueError(
                f"correction {self.correction!r} weighs the proximal over the behavior policy, and "
                "proximal 'behavior' makes both one: set correction to 'token', or proximal to "
                "'current', 'ewma' or 'recomputed'"
            )
        if self.proximal == "current" and self.objective != "ppo":
            raise ValueError(
                f"objective {self.objective!r} clips the ratio to the proximal policy, which is 1 "
                "in a step's only update with proximal 'current': set proximal to 'behavior', "
                "'ewma' or 'recomputed'"
            )
        whole = self.proximal == "behavior" or self.correction in ("sequence", "none")
        if self.objective == "gspo" and not whole:
            raise ValueError(
                f"objective 'gspo' has one term per answer, and correction {self.correction!r} "
                "weighs single tokens: set correction to 'sequence' or 'none', or proximal to "
                "'behavior'"
            )

    @property
    def surveys(self) -> bool:
        """True if a step needs an extra pass over its whole batch beforehand."""
        return (
            self.ess_lr
            or self.baseline == "minimum_variance"
            or self.proximal not in ("current", "behavior")
            or self.kl is not None
        )

    def units(self, batch: TrainingBatch) -> int:
        """Return how many terms the loss is the mean of: sampled tokens; with ``gspo`` answers."""
        return int(batch.spoken.sum()) if self.objective == "gspo" else batch.token_count


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
    reference: Tensor | None = None,
) -> Tensor:
    """Return the loss of ``step`` summed over the batch's `LossConfig.units`, times ``scale``.

    ``proximal`` are the log-probabilities under the proximal policy; None takes the current ones,
    which is right for the policy at the start of the step, or with `Proximal` ``behavior`` the
    recorded ones. ``reference`` are those under the reference policy of a penalty. For a
    microbatch, ``scale`` = microbatches / units of the whole batch makes the mean over microbatches
    the mean over the batch's units.
    """
    anchor = proximal
    if anchor is None:
        anchor = batch.behavior if config.proximal == "behavior" else logprobs.detach()
    weight = behavior_weights(
        anchor,
        batch.behavior,
        batch.mask,
        correction=config.correction,
        cap=config.behavior_cap,
        band=(config.icepop_low, config.icepop_high),
    )
    if config.staleness_discount < 1:
        weight = weight * staleness_weights(
            batch.versions, step=step, discount=config.staleness_discount
        )
    objective = weight * objective_terms(
        logprobs,
        anchor,
        batch.mask,
        batch.advantages[:, None],
        objective=config.objective,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    if config.kl is not None and reference is not None:
        objective = objective - config.kl.weight * divergences(reference, logprobs)
    return -(objective * token_shares(batch.mask, config.objective)).sum() * scale
