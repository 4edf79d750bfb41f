"""States for torch.distributed.checkpoint, and their comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from holdfast.ckpt.state import torch_dtypes

KINDS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]
KINDS += [torch.complex64, torch.float64, torch.complex128]


class Net(nn.Module):
    """Tied weights, a buffer, a layer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6).to(torch.bfloat16)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.body(self.embed(tokens).to(torch.bfloat16)).float())


Parts = tuple[Net, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]


def build(seed: int) -> Parts:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(seed):
        model(torch.arange(11)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def state_of(model: Net, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    """Return the state that a DCP user saves."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict()}


def put_back(parts: Parts, state: dict[str, Any]) -> None:
    model, optimizer, scheduler = parts
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    scheduler.load_state_dict(state["scheduler"])


def same(a: object, b: object) -> bool:
    """Compare trees of tensors and plain values, types included."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def bits(tensor: torch.Tensor) -> bytes:
    return torch_dtypes.as_carrier(tensor).numpy().tobytes()


def mixed(seed: int) -> dict[str, Any]:
    """Tensors and values of every kind, nested, under keys with dots."""
    torch.manual_seed(seed)
    return {
        "a.b": {"c.d": torch.randn(5, 3), "list": [torch.randn(2), {"x": seed}, 3.5]},
        "kinds": {str(kind): (torch.randn(3, 4) * 3).to(kind) for kind in KINDS},
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "turned": torch.randn(4, 3).t(),
        "part": torch.randn(6, 6)[1:4, 2:5],
        "plain": {"none": None, "tuple": (seed, "text", b"bytes"), "flags": [True, [1, 2]]},
        "infinite": float("inf"),
        "numbers": [],
    }


def empty_like(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: empty_like(value) for key, value in state.items()}
    holds_tensors = isinstance(state, list) and any(
        isinstance(item, torch.Tensor) for item in state
    )
    return [empty_like(value) for value in state] if holds_tensors else None


def cause_of(failed: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """The error behind what DCP raises."""
    error: BaseException = failed.value.failures[0][0]
    return error


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
