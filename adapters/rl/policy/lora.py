"""Low-rank adapters: a frozen model of which only a few small matrices are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models". A frozen weight becomes a
non-persistent buffer instead of a parameter. So it is in no snapshot, optimizer, pull or
collective; every process that needs it rebuilds it from the settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.adapters.rl.policy.policy import Policy
from holdfast.elastic.errors import ConfigError

_ADAPTER = "lora_"
"""Prefix of the names of the trained matrices."""


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adapters of rank ``rank``, whose output is scaled by ``alpha`` / ``rank``.

    ``targets`` are the last parts of the names of linear layers, such as ``"qkv"``; empty: all
    linear layers inside the policy's layers get adapters.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}, needed: at least 1")
        if not self.alpha > 0:
            raise ValueError(f"alpha is {self.alpha}, needed: above 0")


class LoraLinear(nn.Module):
    """A frozen linear layer, ``weight`` [out, in] and ``bias``, plus ``up`` @ ``down``, scaled.

    ``lora_down`` [rank, in] starts random and ``lora_up`` [out, rank] zero, so that the layer
    starts equal to the frozen one. The frozen tensors keep their names.
    """

    bias: Tensor | None

    def __init__(self, frozen: nn.Linear, *, rank: int, alpha: float) -> None:
        super().__init__()
        self.scale = alpha / rank
        self.weight, self.bias = frozen.weight, frozen.bias
        like = frozen.weight.detach()
        self.lora_down = nn.Parameter(like.new_empty(rank, frozen.in_features))
        self.lora_up = nn.Parameter(like.new_zeros(frozen.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Transform [..., in] into [..., out]."""
        low = functional.linear(x, self.lora_down)
        wide = functional.linear(low, self.lora_up)
        return functional.linear(x, self.weight, self.bias) + self.scale * wide


def adapt(policy: Policy, config: LoraConfig, *, seed: int) -> None:
    """Freeze a policy and add adapters to its linear layers: a pure function of its arguments.

    Raises ``ConfigError`` for a target that no layer matches.
    """
    found = [*_targets(policy, config)]
    names = {name for _, name, _ in found}
    missing = sorted(set(config.targets) - names)
    if missing or not found:
        there = sorted({name for _, name, _ in _targets(policy, LoraConfig())})
        raise ConfigError(f"lora: no linear layer is called {missing}; the policy has {there}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parent, name, linear in found:
            setattr(parent, name, LoraLinear(linear, rank=config.rank, alpha=config.alpha))
    freeze(policy)


def _targets(policy: Policy, config: LoraConfig) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (parent module, name there, layer) of every linear layer that gets an adapter."""
    for layer in policy.layers():
        for part in layer.modules():
            for name, child in part.named_children():
                wanted = not config.targets or name in config.targets
                if wanted and isinstance(child, nn.Linear):
                    yield part, name, child


def freeze(policy: nn.Module) -> None:
    """Turn all parameters but the adapters' into buffers; tied ones stay tied."""
    frozen: dict[nn.Parameter, Tensor] = {}
    for part in policy.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            if not name.startswith(_ADAPTER):
                delattr(part, name)
                tensor = frozen.setdefault(parameter, parameter.detach())
                part.register_buffer(name, tensor, persistent=False)
