"""The objects that an Accelerator has prepared, under the names of a checkpoint.

The first of each kind has the name of the kind (``model``), the next ones a number
(``model_1``), as in the files of accelerate's own ``save_state``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.ckpt import StateError, torch_private
from holdfast.ckpt.collective import RankWorld
from holdfast.ckpt.state.copying import copy_out
from holdfast.ckpt.state.names import join


def prepared_state(accelerator: Any) -> dict[str, Any]:
    """Return the models, inner optimizers, inner schedulers, scaler and registered objects."""
    state = dict(numbered("model", accelerator._models))
    state |= numbered("optimizer", (each.optimizer for each in accelerator._optimizers))
    state |= numbered("scheduler", (each.scheduler for each in accelerator._schedulers))
    state |= numbered("registered", accelerator._custom_objects)
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state


def numbered(kind: str, items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each item with its name."""
    for i, item in enumerate(items):
        yield (f"{kind}_{i}" if i else kind), item


def settle_buffers(accelerator: Any, world: RankWorld) -> None:
    """Make the buffers of prepared models equal on all ranks, as DDP does before a forward pass.

    Collective. Raises ``StateError`` for a buffer that differs between ranks and that DDP would
    not make equal: a checkpoint keeps one value for all.
    """
    if world.size == 1:
        return
    buffers = {
        f"{name}.{key}": buffer
        for name, model in numbered("model", accelerator._models)
        for key, buffer in _kept_buffers(model)
    }
    if _shares_buffers(accelerator):
        for buffer in buffers.values():
            dist.broadcast(buffer, 0)
    everyone = world.gather({name: _checksum(buffer) for name, buffer in buffers.items()})
    for name, mine in everyone[0].items():
        if any(theirs.get(name) != mine for theirs in everyone):
            raise StateError(
                f"{name}: this buffer differs between ranks, and a checkpoint keeps one value: use "
                "SyncBatchNorm, or DDP with broadcast_buffers=True"
            )


def _shares_buffers(accelerator: Any) -> bool:
    """Say whether models are in DDP that gives all ranks the buffers of rank 0.

    Accelerate keeps the models inside DDP, not DDP itself.
    """
    handler = accelerator.ddp_handler
    is_ddp = accelerator.distributed_type in ("MULTI_CPU", "MULTI_GPU")
    return is_ddp and (handler is None or bool(handler.broadcast_buffers))


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        transient = torch_private.transient_buffers_of(module)
        for key, buffer in torch_private.module_dicts(module)[1].items():
            if key not in transient and type(buffer) is torch.Tensor:
                yield join(path, key), buffer


def _checksum(buffer: torch.Tensor) -> int:
    return copy_out(buffer.detach(), memoryview(bytearray(buffer.nbytes)))
