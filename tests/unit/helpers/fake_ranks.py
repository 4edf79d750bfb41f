"""One rank of a world without the others: DTensors with their placements, no communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import (
    _clear_fast_path_sharding_prop_cache,
    _clear_python_sharding_prop_cache,
)
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def rank_of(rank: int, mesh: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Be one rank of a world whose others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=prod(mesh))
    try:
        yield init_device_mesh("cpu", mesh, mesh_dim_names=tuple("abc"[: len(mesh)]))
    finally:
        dist.destroy_process_group()
        _clear_python_sharding_prop_cache()  # it keeps meshes, which know their rank
        _clear_fast_path_sharding_prop_cache()
