"""Stand-ins for optimizers of the public whose update of an element needs the whole tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.elastic.gradients.whole_tensors import declare_optimizer

BLOCK = 4


class LayerRatio(Optimizer):
    """As LAMB does: Adam's direction, scaled by the ratio of two norms of the tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].lerp_(p.grad.square(), 0.01)
                way = state["mean"] / (state["square"].sqrt() + 1e-6) + 0.01 * p
                p.sub_(way * (p.norm() / (way.norm() + 1e-6)), alpha=group["lr"])


class ByteBlocks(Optimizer):
    """As 8-bit optimizers do: momentum as bytes, with one scale for each block of the tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, blocks = self.state[p], -(-p.numel() // BLOCK)
                if not state:
                    state["codes"] = torch.zeros_like(p, dtype=torch.int8)
                    state["scales"] = torch.zeros(blocks)
                momentum = _blocks(state["codes"].float()) * state["scales"][:, None]
                momentum = momentum * 0.9 + _blocks(p.grad)
                scales = momentum.abs().amax(1) / 127
                codes = (momentum / scales.clamp(min=1e-12)[:, None]).round().to(torch.int8)
                state["codes"].copy_(codes.flatten()[: p.numel()].view_as(p))
                state["scales"].copy_(scales)
                p.sub_(momentum.flatten()[: p.numel()].view_as(p), alpha=group["lr"])


def _blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in rows of a block each, the last one filled up by zeros."""
    flat = tensor.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


OPTIMIZERS: dict[str, Any] = {
    "Muon": torch.optim.Muon,
    "Adafactor": torch.optim.Adafactor,
    "LayerRatio": LayerRatio,
    "ByteBlocks": ByteBlocks,
}


def declare() -> None:
    """Say of those that are not torch's that they need the whole tensor."""
    declare_optimizer(LayerRatio, "whole")
    declare_optimizer(ByteBlocks, "whole")
