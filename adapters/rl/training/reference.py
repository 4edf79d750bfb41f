"""The reference policy of a divergence penalty: an earlier version of the run, or other weights.

It is part of the tracked state, so a restored run goes on with the same reference, and what is
sharded is saved once: snapshots of a reference that did not change are cheap.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from holdfast.adapters.rl.loss.batch import TrainingBatch
from holdfast.adapters.rl.loss.divergence import KLConfig
from holdfast.adapters.rl.loss.ppo import target_logprobs
from holdfast.adapters.rl.policy.policy import local, reshard
from holdfast.elastic.errors import ConfigError


class ReferencePolicy(nn.Module):
    """The reference policy, sharded like the policy itself.

    ``about`` [2], int64: the version of the run that it is, and `KLConfig.origin`.
    """

    about: Tensor

    def __init__(self, policy: nn.Module, config: KLConfig) -> None:
        super().__init__()
        self.policy, self._config = policy, config
        self.register_buffer("about", torch.tensor([0, config.origin]))
        self.requires_grad_(False)

    def require(self, step: int) -> None:
        """Raise ``ConfigError`` unless it is what the settings say for ``step``."""
        version, origin = self.about.tolist()
        wanted = self._config.version_at(step)
        if (version, origin) != (wanted, self._config.origin):
            raise ConfigError(
                f"the reference policy in the restored state is version {version} of a run with "
                f"other settings of loss.kl; step {step} wants version {wanted}: resume with the "
                "renew_every, checkpoint and step that the run began with, or begin a new run"
            )

    @torch.no_grad()
    def logprobs(self, parts: Sequence[TrainingBatch]) -> list[Tensor]:
        """Return every token's log-probability under the reference, [rows, length - 1] each."""
        try:
            return [target_logprobs(self.policy(part.tokens), part.tokens) for part in parts]
        finally:
            reshard(self.policy)

    @torch.no_grad()
    def renew(self, policy: nn.Module, *, version: int) -> None:
        """Become a copy of ``policy``, now of ``version``, if that is due."""
        if self._config.version_at(version) != version or not version:
            return
        reshard(policy)
        for kept, current in zip(self.policy.parameters(), policy.parameters(), strict=True):
            local(kept).copy_(local(current))
        self.about[0] = version
