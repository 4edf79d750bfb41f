"""Bytes that rank 0 has, given to all ranks of a run."""

from __future__ import annotations

import torch
import torch.distributed as dist

from holdfast.elastic import Run


def from_leader(run: Run, payload: bytes) -> bytes:
    """Return the ``payload`` of rank 0; collective, between the passes."""
    if run.world_size == 1:
        return payload
    group = run.mesh.get_group()
    size = torch.tensor([len(payload)])
    dist.broadcast(size, group=group, group_src=0)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if run.is_leader and payload:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(data, group=group, group_src=0)
    return data.numpy().tobytes()
