"""torchtitan's trainer on CPUs with gloo; imported before anything else of torchtitan.

The trainer of torchtitan 0.3 wants an accelerator and torch 2.14 or newer. This module changes two
things from outside: the module globals that name the device, and, for torch 2.13, the missing
``torch.distributed.set_timeout``. `for_cpu` changes the rest by torchtitan's own configuration:
attention without compiled kernels, and sums that gloo can form.
"""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils

CAPACITY_BYTES = 1 << 34


class CpuModule:
    """``torch.cpu`` with the functions of an accelerator's module that torchtitan calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=CAPACITY_BYTES)

    def current_device(self) -> int:
        return 0

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}


torchtitan.tools.utils.device_type = "cpu"
torchtitan.tools.utils.device_module = CpuModule()
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout


def for_cpu(config: Any) -> Any:
    """Return a ``Trainer.Config`` that runs on CPUs: a llama model of two layers."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    spec = config.model_spec
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.parallelize_fn = _with_plain_sums(spec.parallelize_fn)
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.debug.seed = 1
    return config


def _with_plain_sums(parallelize: Any) -> Any:
    """FSDP scales in the reduction, which gloo cannot; torch has a switch for that."""
    from torch.distributed.fsdp import FSDPModule

    @wraps(parallelize)
    def wrapped(model: Any, **settings: Any) -> Any:
        made = parallelize(model, **settings)
        for module in made.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return made

    return wrapped
