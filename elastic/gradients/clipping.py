"""Gradient clipping by the norm over all ranks, for any distribution of the gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from holdfast.ckpt import torch_private
from holdfast.elastic.gradients.exact import exact_norm
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.groups.shards import local_of


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float, *, world: GenerationWorld
) -> float:
    """Scale the gradients to a 2-norm of at most ``max_norm``; return the norm before.

    Every element counts once, on one of the ranks that hold it. Collective.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    gradients = [p.grad for p in given if p.grad is not None]
    parts = [
        gradient.values() if gradient.is_sparse else local_of(gradient) for gradient in gradients
    ]
    counted = [world.counts(gradient) for gradient in gradients]
    norm = exact_norm(
        [part for part, counts in zip(parts, counted, strict=True) if counts],
        terms=max(1, world.over_stages(sum(gradient.numel() for gradient in gradients))),
        reduce_max=world.max_,
        reduce_sum=world.sum_,
    )
    if norm > max_norm:
        with torch.no_grad():
            torch_private.multiply_each(parts, max_norm / norm)
    return norm
