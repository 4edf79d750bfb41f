"""A differentiable all-to-all exchange of rows between the ranks of a mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from holdfast.ckpt.errors import ArgumentError


def all_to_all(
    rows: torch.Tensor, *, send: Sequence[int], receive: Sequence[int], axis: DeviceMesh
) -> torch.Tensor:
    """Send ``rows`` to the ranks along a mesh axis, as tokens to their experts; differentiable.

    The first ``send[0]`` rows (along dim 0) go to the axis's rank 0, the next ``send[1]`` to rank
    1, and so on; ``receive`` gives the number of rows from each rank; the result has the rows in
    that order. Collective along the axis, and again in the backward, which sends the gradients of
    the rows back to their origins. Raises ``ArgumentError`` if the counts do not fit.
    """
    if not len(send) == len(receive) == axis.size() or sum(send) != len(rows):
        raise ArgumentError(
            f"all_to_all of {len(rows)} rows along an axis of {axis.size()} ranks: send={send}, "
            f"receive={receive}; give one count per rank, and of all rows where they go"
        )
    found: torch.Tensor = _AllToAll.apply(rows, list(send), list(receive), axis.get_group())  # type: ignore[no-untyped-call]
    return found


class _AllToAll(torch.autograd.Function):
    """`all_to_all` of a group."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        send: list[int],
        receive: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchanged(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        return _exchanged(gradient, ctx.receive, ctx.send, ctx.group), None, None, None


def _exchanged(
    rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    found = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), receive, send, group=group)
    return found
