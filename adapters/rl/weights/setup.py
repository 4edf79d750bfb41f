"""Construction of a job's policies, and of their shared frozen weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import Tensor, nn

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
    warm-started. ``frozen`` is the digest of the frozen weights, None if there are none, and
    ``frozen_weights`` is a module that has them under their own names.
    """

    def __init__(self, config: RLConfig) -> None:
        self._config, self._first, self.frozen = config, _adapted(config), None
        self.frozen_weights: nn.Module | None = None
        if self._first is not None:
            buffers = dict(self._first.named_buffers())
            self.frozen = weights_hash(buffers)
            self.frozen_weights = _module_of(buffers.items())

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


def _module_of(tensors: Iterable[tuple[str, Tensor]]) -> nn.Module:
    """Return a module with these tensors as frozen parameters, in the same memory."""
    root = nn.Module()
    for fqn, tensor in tensors:
        *path, name = fqn.split(".")
        part = root
        for each in path:
            if each not in dict(part.named_children()):
                part.add_module(each, nn.Module())
            part = part.get_submodule(each)
        part.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return root


def _adapted(config: RLConfig) -> Policy | None:
    if config.lora is None:
        return None
    policy = build_policy(config)
    if config.warm_start is not None:
        from holdfast.adapters.rl.weights.warm_up import load_warm_start

        load_warm_start(policy, config.warm_start)
    adapt(policy, config.lora, seed=config.seed)
    return policy
