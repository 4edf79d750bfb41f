"""The state of the benchmarks: linear layers and their AdamW moments, float32."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.native.isal import address_of
from holdfast.ckpt.snapshot.settings import CopySettings

LAYERS = 12
MANY_LAYERS = 66
"""396 tensors: as many as a model with some hundred million parameters has."""

_PER_LAYER = 3 * 4  # weight and two moments, four bytes each


COPY_ALL: Final = CopySettings(fixed_bytes=sys.maxsize)
"""A state that no step changes stands for one that changes as a whole."""


class BenchState:
    """About ``size_bytes`` in 6 tensors per layer; the attribute ``size_bytes`` is exact."""

    def __init__(self, size_bytes: int, *, seed: int, layers: int = LAYERS) -> None:
        torch.manual_seed(seed)
        side = max(int((size_bytes / layers / _PER_LAYER) ** 0.5), 1)
        self.model = nn.Sequential(*(nn.Linear(side, side) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tracked: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.tensors = dict(self._named())
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def train(self) -> None:
        """Change the state as a step does. Gradients are drawn once."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield f"model.{name}", parameter.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                yield f"optimizer.{name}.{moment}", self.optimizer.state[parameter][moment]

    def wipe(self) -> None:
        """Fill with zeros, so that a load that does nothing is noticed."""
        with torch.no_grad():
            for tensor in self.tensors.values():
                tensor.zero_()

    def require_equal(self, other: BenchState, *, what: str) -> None:
        """Raise ``CorruptError`` unless ``other`` holds the same bits."""
        for name, tensor in self.tensors.items():
            if not torch.equal(tensor, other.tensors[name]):
                raise CorruptError(f"{what}: {name} differs from the saved tensor")

    def views(self) -> list[memoryview]:
        """Return the bytes of every tensor, in place."""
        return [tensor.numpy().reshape(-1).view(np.uint8).data for tensor in self.tensors.values()]


class MirrorMemory:
    """Memory as large as a state, with every page present, as the reference for copies."""

    def __init__(self, state: BenchState) -> None:
        self._state = state
        self._room = np.ones(state.size_bytes, dtype=np.uint8)

    def copy(self) -> None:
        """Copy the state here, tensor by tensor, with the C library's memmove."""
        at = address_of(self._room.data)
        for tensor in self._state.tensors.values():
            ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes


def write_raw(state: BenchState, path: Path) -> None:
    """Write the state into a new file, tensor after tensor, and make it durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for view in state.views():
            at = 0
            while at < view.nbytes:
                at += os.write(fd, view[at:])
        os.fsync(fd)
    finally:
        os.close(fd)


def read_raw(state: BenchState, path: Path) -> None:
    """Read a file of `write_raw` straight into the tensors, without verification."""
    with path.open("rb", buffering=0) as file:
        for view in state.views():
            at = 0
            while at < view.nbytes:
                if not (count := file.readinto(view[at:])):
                    raise CorruptError(f"{path} is shorter than the state")
                at += count
