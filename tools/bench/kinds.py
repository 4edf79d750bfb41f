"""States of the benchmarks of which a step changes little: an adapter, a replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import nn

from holdfast.tools.bench.state import LAYERS, MANY_LAYERS, BenchState

_MOVING: Final = 64
"""One in so many bytes of a frozen state is trained."""

_TRAINED: Final = 256
"""One in so many bytes beside a buffer is a model that is trained."""

_ROW: Final = 1024


class FrozenState(BenchState):
    """A frozen base of linear layers beside an adapter with its optimizer."""

    def __init__(self, size_bytes: int, *, seed: int) -> None:
        super().__init__(size_bytes // _MOVING, seed=seed)
        side = int(((size_bytes - self.size_bytes) / 4 / LAYERS) ** 0.5)
        self.base = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(LAYERS)))
        self.base.requires_grad_(False)
        self.tracked["base"] = self.base
        self.moving_bytes = self.size_bytes
        frozen = {f"base.{name}": each for name, each in self.base.named_parameters()}
        self.tensors |= frozen
        self.size_bytes += sum(tensor.nbytes for tensor in frozen.values())


class BufferState(BenchState):
    """A replay buffer beside a small model with its optimizer; each step writes one row."""

    def __init__(self, size_bytes: int, *, seed: int) -> None:
        super().__init__(size_bytes // _TRAINED, seed=seed)
        rows = (size_bytes - self.size_bytes) // (4 * _ROW)
        self.buffer = torch.ones(rows, _ROW)
        self.written = 0
        self.tracked["buffer"] = self.buffer
        self.tensors["buffer"] = self.buffer
        self.moving_bytes = self.size_bytes + self.buffer[0].nbytes
        self.size_bytes += self.buffer.nbytes

    def train(self) -> None:
        """Change the model, and write the next row of the buffer."""
        super().train()
        self.buffer[self.written] = self.written
        self.written += 1


FULL: Final = "all of the state changes"
ADAPTER: Final = "an adapter on a frozen base"
BUFFER: Final = "a replay buffer"


def _full(size_bytes: int, *, seed: int) -> BenchState:
    return BenchState(size_bytes, seed=seed, layers=MANY_LAYERS)


KINDS: Final[Mapping[str, Callable[..., BenchState]]] = {
    FULL: _full,
    ADAPTER: FrozenState,
    BUFFER: BufferState,
}
"""Makes a state of each kind, given its size in bytes and a ``seed``."""
