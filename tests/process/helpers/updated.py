"""A small net with two optimizers, and a pass of it: for the tests of updates."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from holdfast.elastic.loop.run import Run

DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def parts() -> SimpleNamespace:
    """Return a net and two optimizers over its halves."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    a = torch.optim.SGD(net[0].parameters(), 0.1)
    return SimpleNamespace(net=net, a=a, b=torch.optim.AdamW(net[2].parameters(), 0.1))


def one_pass(run: Run, net: nn.Module, *, scaler: GradScaler | None = None) -> None:
    for x in run.microbatches(DATA):
        loss = (net(x) - x).square().mean()
        run.backward(loss if scaler is None else scaler.scale(loss))


class Shim:
    """An object with ``step`` that is no torch optimizer."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = steps

    def step(self) -> None:
        for step in self.steps:
            step()
