"""Which device a job computes on, and which of its node's a rank takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import torch
import torch.distributed as dist

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.membership.records import Member

Wanted: TypeAlias = Literal["auto", "cpu", "cuda"]

INFO: Final = "cuda_device"
"""Under this name a worker announces the index of the CUDA device it had in its last generation."""


def kind(wanted: Wanted) -> Literal["cpu", "cuda"]:
    """Return what ``wanted`` comes to here. Raises ``ConfigError`` for CUDA that is not there."""
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
    """Return the index of a rank's device: the one it has (`INFO`), else the next that is free.

    Who moved would leave memory behind, which the next on that device may need. ``count`` is how
    many devices this process sees. Raises ``ConfigError`` where there are fewer than ranks on the
    node.
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
