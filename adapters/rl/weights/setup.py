"""Construction of a job's policies, and of their shared frozen weights."""

from __future__ import annotations

import copy

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.policy.lora import adapt
from holdfast.adapters.rl.policy.model import weights_hash
from holdfast.adapters.rl.policy.policy import Policy
from holdfast.adapters.rl.weights.initial import build_policy
from holdfast.elastic.errors import ConfigError


class Policies:
    """Makes policies as they are before any training: a pure function of the configuration.

    With adapters the frozen weights (those of the warm start, if the settings name one) are read
    once, and all policies made here share them. Without adapters, the policies are not
    warm-started. ``frozen`` is the digest of the frozen weights, None if there are none.
    """

    def __init__(self, config: RLConfig) -> None:
        self._config, self._first, self.frozen = config, _adapted(config), None
        if self._first is not None:
            self.frozen = weights_hash(dict(self._first.named_buffers()))

    def build(self) -> Policy:
        """Return a new policy."""
        if self._first is None:
            return build_policy(self._config)
        shared = {id(frozen): frozen for frozen in self._first.buffers()}
        return copy.deepcopy(self._first, shared)


def require_same(frozen: str | None, *, here: str, others: str | None) -> None:
    """Raise ``ConfigError`` if the digests of the frozen weights differ."""
    if frozen != others:
        raise ConfigError(
            f"the frozen weights of {here} have the digest {frozen}, the others' {others}: give "
            "all of them the same pretrained model or warm start"
        )


def _adapted(config: RLConfig) -> Policy | None:
    if config.lora is None:
        return None
    policy = build_policy(config)
    if config.warm_start is not None:
        from holdfast.adapters.rl.weights.warm_up import load_warm_start

        load_warm_start(policy, config.warm_start)
    adapt(policy, config.lora, seed=config.seed)
    return policy
