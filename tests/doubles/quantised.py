"""A tensor that wraps others, as libraries for quantised weights make them."""

from __future__ import annotations

from typing import Any

import torch


class Quantised(torch.Tensor):
    """Integers and a scale for each row."""

    integers: torch.Tensor
    scale: torch.Tensor
    block: int

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor, block: int) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, integers.shape, dtype=scale.dtype, requires_grad=False
        )

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor, block: int) -> None:
        self.integers, self.scale, self.block = integers, scale, block

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["integers", "scale"], {"block": self.block, "layout": object()}

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, metadata: Any, size: Any, stride: Any) -> Quantised:
        return cls(parts["integers"], parts["scale"], metadata["block"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            whole = args[0]
            return cls(whole.integers, whole.scale, whole.block)
        raise NotImplementedError(str(func))
