"""Buffers of models that every rank holds: made equal as DDP does, or refused where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.ckpt import StateError, torch_private
from holdfast.ckpt.collective import RankWorld
from holdfast.ckpt.state.copying import copy_out
from holdfast.ckpt.state.names import join


def settle_buffers(models: Mapping[str, nn.Module], *, is_in_ddp: bool = False) -> None:
    """Give all ranks the buffers that rank 0 has, as DDP does before each forward pass.

    That is done for modules that are a DDP, and for all if ``is_in_ddp``. Collective over all
    ranks. Raises ``StateError`` for a buffer that differs between ranks, and which DDP would not
    make equal: a checkpoint keeps one value for all.
    """
    world = RankWorld()
    if world.size == 1:
        return
    sums: dict[str, int] = {}
    for name, model in models.items():
        given = is_in_ddp or any(
            isinstance(each, DistributedDataParallel) and each.broadcast_buffers
            for each in model.modules()
        )
        for key, buffer in _kept_buffers(model):
            if given:
                dist.broadcast(buffer, 0)
            sums[join(name, key)] = copy_out(buffer.detach(), memoryview(bytearray(buffer.nbytes)))
    everyone = world.gather(sums)
    for name, mine in everyone[0].items():
        if any(theirs.get(name) != mine for theirs in everyone):
            raise StateError(
                f"{name}: this buffer differs between ranks, and a checkpoint keeps one value: use "
                "SyncBatchNorm, or DDP with broadcast_buffers=True"
            )


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        transient = torch_private.transient_buffers_of(module)
        for key, buffer in torch_private.module_dicts(module)[1].items():
            if key not in transient and type(buffer) is torch.Tensor:
                yield join(path, key), buffer
