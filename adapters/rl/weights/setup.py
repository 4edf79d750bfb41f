"""Construction of a job's policies, and of their shared frozen weights."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.policy.lora import adapt, freeze
from holdfast.adapters.rl.policy.model import weights_hash
from holdfast.adapters.rl.policy.policy import Policy
from holdfast.adapters.rl.policy.settings import CLASSIFIERS
from holdfast.adapters.rl.policy.team import ONLY, prefix_of
from holdfast.adapters.rl.weights.beginning import load_beginning
from holdfast.adapters.rl.weights.initial import build_policy
from holdfast.elastic.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.adapters.rl.policy.classifier import Classifier


class PolicyMaker:
    """Makes one policy as it is before any training: a pure function of the configuration.

    With adapters, and if it is ``frozen``, the frozen weights are those that it begins with. They
    are read once, and all policies made here share them. Otherwise, policies are made without the
    weights that they begin with (`begin`). ``buffers`` are the frozen weights by name.
    """

    def __init__(self, config: RLConfig, *, frozen: bool = False) -> None:
        self._config = config
        self._first = _with_frozen_weights(config, frozen=frozen)
        self.buffers = {} if self._first is None else dict(self._first.named_buffers())

    def build(self) -> Policy:
        """Return a new policy."""
        if self._first is None:
            return build_policy(self._config)
        shared = {id(frozen): frozen for frozen in self._first.buffers()}
        return copy.deepcopy(self._first, shared)

    def begin(self, policy: Policy) -> None:
        """Fill a policy that is all trained with the weights that it begins with, if any."""
        if self._first is None:
            load_beginning(policy, self._config)


class Policies:
    """Makes the policies of a job, each by its `PolicyMaker`, by name.

    ``frozen`` is the digest of all frozen weights, None if there are none, and ``frozen_weights``
    is a module that has them under their own names; those of the ``classifiers`` are among them.
    """

    def __init__(self, config: RLConfig) -> None:
        by_policy = config.by_policy
        self.makers = {
            name: PolicyMaker(each, frozen=name in config.frozen)
            for name, each in by_policy.items()
        }
        _require_one_vocabulary({each.pretrained for each in by_policy.values()})
        buffers = {
            f"{prefix_of(name)}{fqn}": tensor
            for name, maker in self.makers.items()
            for fqn, tensor in maker.buffers.items()
        }
        self.classifiers = _classifiers(config.classifiers)
        buffers |= {
            f"{CLASSIFIERS}.{name}.{fqn}": tensor
            for name, each in self.classifiers.items()
            for fqn, tensor in each.tensors().items()
        }
        self.frozen = weights_hash(buffers) if buffers else None
        self.frozen_weights = _module_of(buffers.items()) if buffers else None

    def each(self) -> dict[str, Policy]:
        """Return new policies by name."""
        return {name: maker.build() for name, maker in self.makers.items()}

    def build(self) -> Policy:
        """Return a new policy, the only one of the job."""
        return self.makers[ONLY].build()


def require_same(frozen: str | None, *, here: str, others: str | None) -> None:
    """Raise ``ConfigError`` if the digests of the frozen weights differ."""
    if frozen != others:
        raise ConfigError(
            f"the frozen weights of {here} have the digest {frozen}, the others' {others}: give "
            "all of them the same pretrained model or warm start"
        )


def _classifiers(directories: Mapping[str, str]) -> dict[str, Classifier]:
    if not directories:
        return {}
    from holdfast.adapters.rl.policy.classifier import Classifier

    return {name: Classifier(name, directory) for name, directory in directories.items()}


def _require_one_vocabulary(directories: Collection[str | None]) -> None:
    """Raise ``ConfigError`` if pretrained models name the same token by different numbers."""
    if len(directories) < 2:
        return
    from holdfast.adapters.rl.policy.pretrained import PretrainedTokenizer

    first, *others = sorted(filter(None, directories))
    known = PretrainedTokenizer(first)
    for directory in others:
        found = PretrainedTokenizer(directory)
        if (found.vocabulary, found.end) != (known.vocabulary, known.end):
            raise ConfigError(
                f"{directory}: its tokenizer is not that of {first}: all policies of a job read "
                "the same tokens; choose models of one family"
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


def _with_frozen_weights(config: RLConfig, *, frozen: bool) -> Policy | None:
    """Return a policy of which some or all weights are frozen; None if all are trained."""
    if config.lora is None and not frozen:
        return None
    policy = build_policy(config)
    load_beginning(policy, config)
    if config.lora is None:
        freeze(policy)
    else:
        adapt(policy, config.lora, seed=config.seed)
    return policy
