"""Names and ranges of FSDP1 parameters within their flat parameters; nothing is gathered.

FSDP1 (``FullyShardedDataParallel``) flattens and concatenates the parameters of a module, and cuts
the result evenly over ranks: a rank holds a contiguous range of some parameters and nothing of
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import StateError
from holdfast.ckpt.state.local_boxes import FlatShard, Leaf
from holdfast.ckpt.state.names import clean, join
from holdfast.ckpt.state.optimizers import FlatWindow, OptimizedParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatModule:
    """The parameters of one FSDP1 module itself, without those of FSDP1 modules inside it.

    ``aliases`` maps the name of a shared parameter to the name of the member that stores it. Ignore
    the attributes that the modules have under these names: they may be gone, or gathered.
    """

    members: tuple[OptimizedParameter, ...]
    aliases: dict[str, str]


def reshard(module: nn.Module) -> None:
    """Free the parameters that FSDP1 modules gathered, as before an optimizer step."""
    for child in module.modules():
        if not isinstance(child, FullyShardedDataParallel):
            continue
        if handle := torch_private.flat_handle_of(child):
            gathered = handle.uses_sharded_strategy and not handle.is_sharded(handle.flat_param)
            if gathered and not torch_private.is_summoned(handle):
                torch_private.reshard_flat(child, handle)


def flat_module(name: str, module: FullyShardedDataParallel) -> FlatModule:
    """Return the parameters that ``module``, called ``name`` in the state, flattens itself.

    Raises ``StateError`` if they are gathered and cannot be resharded.
    """
    handle = torch_private.flat_handle_of(module)
    if handle is None:
        return FlatModule(members=(), aliases={})
    flat = handle.flat_param
    if handle.uses_sharded_strategy and not handle.is_sharded(flat):
        raise StateError(
            f"{name}: its FSDP parameters are gathered; leave summon_full_params first"
        )
    members = _members(name, handle, flat)
    aliases = {
        clean(join(name, found.module_name, found.param_name)): clean(
            join(name, found.prim_module_name, found.prim_param_name)
        )
        for found in torch_private.shared_in_flat(handle)
    }
    return FlatModule(members=tuple(members), aliases=aliases)


def _members(name: str, handle: Any, flat: torch.Tensor) -> Iterator[OptimizedParameter]:
    for fqn, shape, shard, original in torch_private.flat_rows(handle):
        full, part = clean(join(name, fqn)), _Range.of(shard)
        if original is None:
            local = flat.detach()[part.at : part.at + part.length]
            leaf = FlatShard(local, shape=shape, start=part.start)
            window = FlatWindow(at=part.at, part=leaf)
            yield OptimizedParameter(fqn=full, parameter=flat, leaf=leaf, window=window)
        else:
            yield OptimizedParameter(
                fqn=full, parameter=original, leaf=_original(original, shape, part)
            )


def _original(parameter: torch.Tensor, shape: torch.Size, part: _Range) -> Leaf:
    """Return an original parameter as a leaf: a `FlatShard` while it is sharded, else itself."""
    if parameter.ndim != 1 or parameter.numel() != part.length:
        return parameter
    return FlatShard(parameter, shape=shape, start=part.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """Elements of a parameter from ``start`` on, at ``at`` in this rank's flat parameter."""

    start: int
    length: int
    at: int

    @classmethod
    def of(cls, shard: Any) -> _Range:
        if not shard.in_shard:
            return cls(start=0, length=0, at=0)
        return cls(
            start=shard.intra_param_start_idx,
            length=shard.numel_in_shard,
            at=shard.offset_in_shard,
        )
