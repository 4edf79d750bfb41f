"""The model of the jobs that are hurt, the same for every way of getting over it.

It is built without being filled, as large models are: what is to be restored anyway needs no
initial values.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WIDTH: Final = 1024
_LAYER_BYTES: Final = 3 * 4 * WIDTH * WIDTH  # weight and two moments
_SAMPLES: Final = 4096


def build(size_bytes: int, *, mesh: DeviceMesh | None = None) -> nn.Sequential:
    """Return layers whose state, with Adam's moments, has about ``size_bytes``; not filled yet.

    They are sharded over ``mesh`` (FSDP2), or whole without one.
    """
    count = max(size_bytes // _LAYER_BYTES, 1)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    if mesh is not None:
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
    return model.to_empty(device="cpu")


def fill(model: nn.Module) -> None:
    """Give a model that restored nothing its initial values."""
    bound = WIDTH**-0.5
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        nn.init.uniform_(local, -bound, bound)


def samples() -> torch.Tensor:
    """Return the data, one sample a row."""
    return torch.randn(_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    found: torch.Tensor = model(batch).square().mean()
    return found
