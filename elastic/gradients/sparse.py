"""Sparse gradients: collected per microbatch, added in the order of microbatches on every rank.

``nn.Embedding(sparse=True)`` gives the rows that a microbatch used. They are merged by index within
the microbatch. After the pass all ranks exchange the rows of all microbatches and add them in one
order, so the sum has equal bits at any number of ranks, without a grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.ckpt.state.kinds.model_parts import ModelParts
from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError, NotFiniteError
from holdfast.elastic.gradients.summing import Reducer, sum_whole
from holdfast.elastic.gradients.wrapped import Parameters, Parts
from holdfast.elastic.groups.by_microbatch import STAND_IN


class SparseGradients:
    """The sparse gradients of a pass; ``reducer`` reduces over the ranks with other microbatches.

    A gradient is a sparse COO tensor of one sparse dim.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module | ModelParts],
        reducer: Reducer,
        *,
        microbatches: int,
        exact: Exact,
    ) -> None:
        self._parts, self._reducer = Parts(modules), reducer
        self._microbatches, self._exact = microbatches, exact
        self._parameters: Parameters = []
        self._found: dict[str, dict[int, torch.Tensor]] = {}

    def begin_pass(self, parameters: Parameters) -> None:
        """Start a pass; raises ``ConfigError`` for a sharded layer with sparse gradients."""
        self._parameters, self._found = parameters, {}
        for name, part in self._parts.named if self._parts.renew() else ():
            if getattr(part, "sparse", None) is not True:
                continue
            if any(isinstance(p, DTensor) for p in part.parameters(recurse=False)):
                raise ConfigError(
                    f"{name} ({type(part).__name__}) has sparse=True and is sharded, and shards "
                    "have no sparse gradients: set sparse=False and take the dense form of the "
                    "optimizer (Adam for SparseAdam), or leave the layer out of fully_shard by "
                    "ignored_params"
                )

    def take(self, microbatch: int) -> None:
        """Take the sparse gradients that a backward left out of ``.grad``."""
        for name, parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                parameter.grad = None
                if gradient.sparse_dim() != 1:
                    raise ConfigError(
                        f"the gradient of {name} has {gradient.sparse_dim()} sparse dims: only "
                        "rows can be added up; make it dense"
                    )
                if microbatch != STAND_IN:
                    self._found.setdefault(name, {})[microbatch] = gradient.coalesce()

    def has(self, name: str) -> bool:
        """Return whether this rank took a gradient of the parameter in the pass."""
        return name in self._found

    def end_pass(self, parameters: Parameters) -> None:
        """Store the mean gradients of the parameters that some rank took gradients of; collective.

        Raises ``ConfigError`` and ``NotFiniteError``, naming the parameter, on all ranks together.
        """
        if not parameters:
            return
        table = torch.zeros(len(parameters), self._microbatches + 1, dtype=torch.float64)
        for row, (name, parameter) in enumerate(parameters):
            table[row, -1] = parameter.grad is not None
            for microbatch, gradient in self._found.get(name, {}).items():
                table[row, microbatch] = 1 + gradient.indices().shape[1]
        self._reducer.max_(table)
        for (name, parameter), (*counts, dense) in zip(
            parameters, table.long().tolist(), strict=True
        ):
            if dense:
                raise ConfigError(
                    f"the gradient of {name} is sparse in some microbatches and dense in others: "
                    "set sparse=False and take the dense form of the optimizer (Adam for "
                    "SparseAdam)"
                )
            parameter.grad = self._mean(name, parameter, [max(0, n - 1) for n in counts])
        self._found = {}

    def _mean(self, name: str, parameter: nn.Parameter, rows: Sequence[int]) -> torch.Tensor:
        indices = torch.zeros(sum(rows), dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_zeros(len(indices), *parameter.shape[1:])
        parts = zip(torch.split(indices, list(rows)), torch.split(values, list(rows)), strict=True)
        for microbatch, (index, value) in enumerate(parts):
            gradient = self._found.get(name, {}).get(microbatch)
            if gradient is not None:
                index.copy_(gradient.indices()[0])
                value.copy_(gradient.values())
        sum_whole([indices, values], self._reducer.sum_)
        values.add_(0.0)  # a sum with zeros has no -0 either
        if self._exact and not bool(values.isfinite().all()):
            raise NotFiniteError(
                f"the gradient of {name} is not finite: lower the learning rate or look at the data"
            )
        wide = torch.promote_types(values.dtype, torch.float32)
        total = _rows(indices, values.to(wide), parameter).coalesce()
        mean = (total.values() / self._microbatches).to(parameter.dtype)
        return _rows(total.indices()[0], mean, parameter, is_coalesced=True)

    def refuse_left(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Raise ``ConfigError`` for a sparse gradient that no `take` saw: of a pipeline's stage."""
        for name, parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ConfigError(
                    f"the gradient of {name} is sparse, which a pipeline cannot add up: set "
                    "sparse=False and take the dense form of the optimizer (Adam for SparseAdam)"
                )


def _rows(
    indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor, *, is_coalesced: bool = False
) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        indices.unsqueeze(0), values, like.shape, is_coalesced=is_coalesced, check_invariants=False
    )
