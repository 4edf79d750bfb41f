"""Choice of a job's device type, and of the node's device that a rank uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import torch
import torch.distributed as dist

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.membership.records import Member

Wanted: TypeAlias = Literal["auto", "cpu", "cuda"]

INFO: Final = "cuda_device"
"""Key under which a worker announces the index of the CUDA device of its last generation."""


def kind(wanted: Wanted) -> Literal["cpu", "cuda"]:
    """Return the device type for ``wanted``. Raises ``ConfigError`` if CUDA is not available."""
    if wanted == "cpu" or ((missing := _missing()) and wanted == "auto"):
        return "cpu"
    if missing:
        raise ConfigError(f"Mesh(device='cuda'): {missing}; give device='cpu' to train without")
    return "cuda"


def _missing() -> str:
    if not torch.cuda.is_available():
        return "torch finds no CUDA device here"
    return "" if dist.is_nccl_available() else "this build of torch has no NCCL"


def index_of(rank: int, members: Sequence[Member], *, count: int) -> int:
    """Return the index of a rank's device: the one it has (`INFO`), else the next free one.

    A worker that changed its device would leave memory behind, which the next worker on that device
    may need. ``count`` is the number of devices that this process sees. Raises ``ConfigError`` if
    there are fewer than the node has ranks.
    """
    node = next(member.node for member in members if member.rank == rank)
    here = sorted((m for m in members if m.node == node), key=lambda member: member.rank)
    if len(here) > count:
        raise ConfigError(
            f"node {node} has {len(here)} ranks and rank {rank} sees {count} CUDA devices: start "
            "at most one rank per device, and let every one see all of its node's devices "
            "(CUDA_VISIBLE_DEVICES)"
        )
    owners: dict[int, int] = {}
    for member in here:
        had = member.info.get(INFO)
        if isinstance(had, int) and 0 <= had < count:
            owners.setdefault(had, member.rank)
    free = (index for index in range(count) if index not in owners)
    newcomers = [member.rank for member in here if member.rank not in owners.values()]
    found = {owner: index for index, owner in owners.items()}
    found.update(zip(newcomers, free, strict=False))
    return found[rank]
