"""The policy of a job: its interface, its construction, and its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from holdfast.elastic.errors import ConfigError


class Policy(nn.Module, ABC):
    """A language model that is trained on whole sequences and samples one token per slot.

    By `decode` a token's logits must depend on the tokens before it and on nothing else, bit for
    bit: not on the slot, not on the neighbours, not on whether the sequence was interrupted and fed
    again.
    """

    @abstractmethod
    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [rows, length, vocabulary] of ``tokens`` [rows, length]."""

    @abstractmethod
    def new_cache(self, slots: int) -> Any:
        """Return an empty key-value cache for ``slots`` sequences."""

    @abstractmethod
    def prefill(self, tokens: Tensor, slots: Tensor, cache: Any) -> None:
        """Feed ``tokens`` [rows, length] at once to ``slots`` [rows], each from its beginning.

        Equal to feeding them one by one to `decode`, except for rounding. Cache content behind the
        end of a shorter sequence is arbitrary, and overwritten as the sequence grows.
        """

    @abstractmethod
    def decode(self, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Feed one token per slot (``tokens``, ``positions``: [slots]); return logits per slot."""

    def cut(self, mesh: DeviceMesh) -> None:
        """Cut the layers over the ranks of a one-axis mesh, whose results are added up.

        Raises ``ConfigError`` if this kind of policy cannot be cut.
        """
        raise ConfigError(f"a {type(self).__name__} cannot be split over {mesh.size()} ranks")

    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """Return the modules that are sharded separately, first to last."""


def parameter_names(policy: nn.Module) -> list[str]:
    """Return the names of the parameters, a tied one only once."""
    return [name for name, _ in policy.named_parameters()]


@torch.no_grad()
def fill(policy: nn.Module, tensors: Mapping[str, Tensor], *, prefix: str = "") -> None:
    """Copy whole tensors into the parameters, by their names behind ``prefix``.

    Raises ``KeyError`` for a missing one.
    """
    for name, parameter in policy.named_parameters():
        parameter.copy_(tensors[f"{prefix}{name}"])


def full_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Return every parameter whole; collective."""
    return dict(_whole(policy))


def _whole(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in policy.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        yield name, full.detach()


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, which is the whole one unless it is sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def shard(policy: Policy, mesh: DeviceMesh) -> None:
    """Cut a policy over the axis ``tp`` of the mesh, if there is one, and shard it over ``dp``.

    FSDP2 shards each layer separately, then the rest.
    """
    if "tp" in (mesh.mesh_dim_names or ()):
        if mesh["tp"].size() > 1:
            policy.cut(mesh["tp"])
        mesh = mesh["dp"]
    for layer in policy.layers():
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def reshard(policy: nn.Module) -> None:
    """Free the full parameters that a forward pass without a backward left behind."""
    for part in policy.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
