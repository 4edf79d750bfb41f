"""A Trainer's model and optimizer under FSDP2: cut by accelerate's function over a run's mesh.

Trainer and accelerate are not told, because their own preparation knows one mesh for the whole
process: between generations, and for every file that is written, they find a plain model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import TrainingArguments

from holdfast.adapters.hf.shards import ShardedModel
from holdfast.elastic import ConfigError, Run


def cut(trainer: Any, run: Run) -> ShardedModel:
    """Cut the model and the optimizer of a Trainer over the mesh of ``run``.

    Raises ``ConfigError`` if the model has trained weights of several dtypes.
    """
    model = trainer.model
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    if len(kinds) > 1:
        raise ConfigError(
            f"fsdp: the model has trained weights of {', '.join(sorted(map(str, kinds)))}, and "
            "FSDP2 needs one dtype: give the model in one, such as from_pretrained(..., "
            "dtype=torch.float32)"
        )

    def apply(module: nn.Module) -> None:
        plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
        fsdp2_prepare_model(_stand_in(plugin, run), module)
        if hasattr(module, "generate"):
            register_fsdp_forward_method(module, "generate")

    return ShardedModel(model, trainer.optimizer, apply)


def share_first(shards: ShardedModel, run: Run) -> None:
    """Take rank 0's first weights on all ranks; collective."""

    def broadcast(tensor: torch.Tensor) -> None:
        if run.world_size > 1:
            dist.broadcast(tensor, src=0)

    shards.share_first(broadcast)


@contextmanager
def unannounced(given: Iterable[Any]) -> Iterator[None]:
    """Hide FSDP from a Trainer that is being made, which would form process groups for it."""
    hidden = [
        (each, each.fsdp, each.fsdp_plugin_args)
        for each in given
        if isinstance(each, TrainingArguments)
    ]
    for args, _, _ in hidden:
        args.fsdp, args.fsdp_plugin_args = None, None
    try:
        yield
    finally:
        for args, fsdp, plugin in hidden:
            args.fsdp, args.fsdp_plugin_args = fsdp, plugin


def _stand_in(plugin: Any, run: Run) -> Any:
    """Return what accelerate's function asks of an Accelerator.

    The model computes in the dtypes that it has without FSDP: autocast is around its forward.
    """
    mesh = run.data_mesh
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision="no",
        is_main_process=run.is_leader,
        device=run.device,
    )
