"""Parameters and gradients that are cut over the ranks of a mesh: who reduces, who counts them.

FSDP2 reduces the gradients of what it shards. Everything else is summed over the data-parallel
axis by us: plain tensors, and DTensors that only tensor parallelism cuts. Experts that are cut over
``ep`` are summed over those ranks alone that hold the same ones: what the others gave them to do
they have seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

EXPERTS = "ep"
"""The axis along which ranks have different experts."""

MODEL_AXES = frozenset({"tp", EXPERTS})
"""Axes along which ranks hold parts of the model, not of what FSDP2 shards."""


def is_reduced_by_fsdp(parameter: torch.Tensor) -> bool:
    """Say whether this is a shard of FSDP2's, whose gradient it reduces over the data axes."""
    if not isinstance(parameter, DTensor):
        return False
    axes = parameter.device_mesh.mesh_dim_names
    return axes is None or not MODEL_AXES.issuperset(axes)


def experts_of(parameter: torch.Tensor) -> Placement | None:
    """Return how a parameter lies along the axis of the experts, None where it does not."""
    if not isinstance(parameter, DTensor):
        return None
    axes = parameter.device_mesh.mesh_dim_names or ()
    return parameter.placements[axes.index(EXPERTS)] if EXPERTS in axes else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor lies at this rank, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def settled(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient that lies as its parameter does: what is partial is added up.

    Collective over the parameter's mesh. Sequence parallelism leaves the gradients of replicated
    parameters as terms of a sum.
    """
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies as ``tensor`` does and is ``local`` at this rank."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def settle(parameter: nn.Parameter) -> None:
    """Have the gradient of a parameter lie as it does; see `settled`."""
    if parameter.grad is not None:
        parameter.grad = settled(parameter.grad, parameter)


def counts_here(tensor: torch.Tensor, *, rank: int, first: int) -> bool:
    """Say whether ``rank`` is the one that counts what it holds of a tensor.

    Of the ranks that hold the same, one does. ``first`` is the first of those among which the
    tensor exists: whoever holds a plain tensor holds all of it, and so does every copy of the
    mesh of a DTensor that does not span them all.
    """
    if not isinstance(tensor, DTensor):
        return rank == first
    mesh = tensor.device_mesh
    if first not in mesh.mesh.flatten().tolist():
        return False
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    return all(
        not placement.is_replicate() or at == 0
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
