"""The model of the faulted jobs, the same for Holdfast and the other tools.

It is built without initial values, as large models are: a restored model needs none.
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
    """Return uninitialised layers whose state, with Adam's moments, has about ``size_bytes``.

    They are sharded over ``mesh`` (FSDP2), or whole if there is none.
    """
    count = max(size_bytes // _LAYER_BYTES, 1)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    if mesh is not None:
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
    return model.to_empty(device="cpu")


def fill(model: nn.Module) -> None:
    """Give initial values to a model that restored nothing."""
    bound = WIDTH**-0.5
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        nn.init.uniform_(local, -bound, bound)


def samples() -> torch.Tensor:
    """Return the data, one sample per row."""
    return torch.randn(_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    found: torch.Tensor = model(batch).square().mean()
    return found
