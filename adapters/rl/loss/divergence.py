"""The divergence from a reference policy: its settings and its estimator."""

from __future__ import annotations

import hashlib

import msgspec
from torch import Tensor

_MOST_LOG = 20.0
"""Larger log-ratios count as this one, so that the estimate stays finite."""


class KLConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A penalty of ``weight`` times the divergence of the policy from a reference.

    The reference is policy version 0, or, with ``renew_every``, the newest version whose number is
    a multiple of that. ``step`` of ``checkpoint`` has other weights of the same shape, to begin
    with instead of version 0. The penalty is part of the loss, token by token (Shao et al.,
    "DeepSeekMath"); with ``as_reward`` it is subtracted from the reward of each answer, added up
    over its tokens.
    """

    weight: float = 0.01
    checkpoint: str | None = None
    step: int | None = None
    renew_every: int | None = None
    as_reward: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight is {self.weight}, needed: above 0")
        if self.renew_every is not None and self.renew_every < 1:
            raise ValueError(f"renew_every is {self.renew_every}, needed: 1 or more, or null")
        if (self.checkpoint is None) != (self.step is None):
            raise ValueError(
                "checkpoint and step belong together: give both (the step of a warm start is 0), "
                "or none for version 0"
            )

    def version_at(self, step: int) -> int:
        """Return the version that is the reference of ``step``; 0: the reference of the begin."""
        return 0 if self.renew_every is None else step - step % self.renew_every

    @property
    def origin(self) -> int:
        """A number that stands for the checkpoint of the first reference; 0 for version 0."""
        if self.checkpoint is None:
            return 0
        named = f"{self.step} {self.checkpoint}".encode()
        digest = hashlib.blake2b(named, digest_size=7).digest()
        return 1 + int.from_bytes(digest, "big")


def divergences(reference: Tensor, logprobs: Tensor) -> Tensor:
    """Return an estimate of every token's divergence, never below 0, of the arguments' shape.

    With r the log-probability under the reference minus that under the policy that sampled, it is
    exp(r) - r - 1: without bias, and of low variance (Schulman, "Approximating KL Divergence": k3).
    """
    logs = (reference - logprobs).clamp(max=_MOST_LOG)
    return logs.exp() - logs - 1


def answer_divergences(reference: Tensor, behavior: Tensor, mask: Tensor) -> Tensor:
    """Return the divergence of each answer, the sum over its sampled tokens: float64 [rows]."""
    return (divergences(reference, behavior) * mask).double().sum(1)
