"""Log-probabilities under proximal policies other than that of the start of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from holdfast.adapters.rl.loss.batch import TrainingBatch
from holdfast.adapters.rl.loss.ppo import target_logprobs
from holdfast.adapters.rl.policy.policy import fill, local, reshard


class ProximalPolicy(Protocol):
    """Gives the log-probabilities of sampled tokens."""

    def logprobs(self, parts: Sequence[TrainingBatch]) -> list[Tensor]:
        """Return [rows, length - 1] for each part; called by all ranks with equally many."""


class Ewma:
    """A running mean of the weights, `module`, sharded and tracked like the policy itself.

    Hilton et al., "Batch size-invariance for policy optimization".
    """

    def __init__(self, module: nn.Module, policy: nn.Module, *, decay: float) -> None:
        self.module, self._policy, self._decay = module, policy, decay
        module.requires_grad_(False)

    @torch.no_grad()
    def logprobs(self, parts: Sequence[TrainingBatch]) -> list[Tensor]:
        """Return every token's log-probability under the mean policy."""
        try:
            return [target_logprobs(self.module(part.tokens), part.tokens) for part in parts]
        finally:
            reshard(self.module)  # `update` must reach its own parts, not what was gathered

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the policy, after its step."""
        pairs = zip(self.module.parameters(), self._policy.parameters(), strict=True)
        for mean, current in pairs:
            local(mean).lerp_(local(current), 1 - self._decay)


class Recomputed:
    """The policies that sampled, loaded from the kept snapshots.

    ``weights_of`` returns the tensors of a version. ``policy`` is filled with one version after the
    other, so that this takes the memory of a single one. ``filled`` is told each time, and may
    change the weights.
    """

    def __init__(
        self,
        policy: nn.Module,
        weights_of: Callable[[int], Mapping[str, Tensor]],
        *,
        filled: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy = policy.eval()
        self._weights_of, self._filled = weights_of, filled

    @torch.no_grad()
    def logprobs(self, parts: Sequence[TrainingBatch]) -> list[Tensor]:
        """Return every token's log-probability under its own version, 0 where none was sampled."""
        found = [torch.zeros_like(part.behavior) for part in parts]
        for version in sorted({version for part in parts for version in part.sampled_by}):
            fill(self._policy, self._weights_of(version))
            self._filled()
            for part, logprobs in zip(parts, found, strict=True):
                own = (part.mask > 0) & (part.versions == version)
                if own.any():
                    measured = target_logprobs(self._policy(part.tokens), part.tokens)
                    logprobs[own] = measured[own]
        return found
