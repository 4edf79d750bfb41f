"""Which device a job computes on, and which of its node's a rank takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from elastic.errors import ConfigError
from elastic.records import Member

Wanted: TypeAlias = Literal["auto", "cpu", "cuda"]


def kind(wanted: Wanted) -> Literal["cpu", "cuda"]:
    """Return what ``wanted`` comes to here. Raises ``ConfigError`` for CUDA that is not there."""
    missing = _missing()
    if wanted == "cpu" or (wanted == "auto" and missing):
        return "cpu"
    if missing:
        raise ConfigError(f"Mesh(device='cuda'): {missing}; give device='cpu' to train without")
    return "cuda"


def _missing() -> str:
    if not torch.cuda.is_available():
        return "torch finds no CUDA device here"
    return "" if dist.is_nccl_available() else "this build of torch has no NCCL"


def index_of(rank: int, members: Sequence[Member], *, count: int) -> int:
    """Return the index of the rank's device: its place among the ranks of its node.

    ``count`` is how many devices this process sees. Raises ``ConfigError`` where there are fewer
    than ranks on the node.
    """
    node = next(member.node for member in members if member.rank == rank)
    ranks = sorted(member.rank for member in members if member.node == node)
    if len(ranks) > count:
        raise ConfigError(
            f"node {node} has {len(ranks)} ranks and rank {rank} sees {count} CUDA devices: start "
            "at most one rank per device, and let every one see all of its node's devices "
            "(CUDA_VISIBLE_DEVICES)"
        )
    return ranks.index(rank)
