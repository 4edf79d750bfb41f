"""Parameters and gradients sharded over the ranks of a mesh: which code reduces and counts them.

FSDP2 reduces the gradients of the parameters that it shards. Holdfast sums all others over the
data-parallel axis: plain tensors, and DTensors that only tensor parallelism shards. Experts that
are sharded over ``ep`` are summed only over the ranks that hold the same ones, because these have
already processed the tokens of the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

EXPERTS = "ep"
"""The axis along which ranks have different experts."""

MODEL_AXES = frozenset({"tp", EXPERTS})
"""Axes along which ranks hold parts of the model, as opposed to FSDP2's shards."""


def is_reduced_by_fsdp(parameter: torch.Tensor) -> bool:
    """Return whether this is a shard of FSDP2's, which reduces its gradient over the data axes."""
    if not isinstance(parameter, DTensor):
        return False
    axes = parameter.device_mesh.mesh_dim_names
    return axes is None or not MODEL_AXES.issuperset(axes)


def data_axes(parameter: DTensor) -> list[int]:
    """Return the axes of its mesh along which ranks see other samples, by number."""
    axes = parameter.device_mesh.mesh_dim_names or ("",) * parameter.device_mesh.ndim
    return [number for number, axis in enumerate(axes) if axis not in MODEL_AXES]


def experts_of(parameter: torch.Tensor) -> Placement | None:
    """Return a parameter's placement along the axis of the experts, None if it has none."""
    if not isinstance(parameter, DTensor):
        return None
    axes = parameter.device_mesh.mesh_dim_names or ()
    return parameter.placements[axes.index(EXPERTS)] if EXPERTS in axes else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def settled(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient with its parameter's placements; partial values are added up.

    Collective over the parameter's mesh. Sequence parallelism leaves the gradients of replicated
    parameters as terms of a sum.
    """
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's ``.grad``; of FSDP2's shards the parameter's own."""
    own: torch.dtype | None = parameter.grad_dtype
    return parameter.dtype if own is None or is_reduced_by_fsdp(parameter) else own


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros that can be a parameter's ``.grad``."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter), requires_grad=False)


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the placements of ``tensor`` and the local part ``local``."""
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
    """Give a parameter's gradient the parameter's placements; see `settled`."""
    if parameter.grad is not None:
        parameter.grad = settled(parameter.grad, parameter)


def counts_here(tensor: torch.Tensor, *, rank: int, first: int) -> bool:
    """Return whether ``rank`` counts its part of a tensor.

    Of the ranks that hold the same part, one does. ``first`` is the first of the ranks that have
    the tensor: each of them holds the whole of a plain tensor. If a DTensor's mesh does not span
    them all, every copy of that mesh holds the whole of it.
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
