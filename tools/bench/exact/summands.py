"""A rank that sums gradients in one of several ways, to time, check and train with."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Work

from holdfast.ckpt.torch_private import TCPStore
from holdfast.elastic.config import Exact
from holdfast.elastic.gradients.mean import Gradients

PARAMETERS: Final = 16
_TIMEOUT_S = 120.0
_WIDTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SummingSeat:
    """A rank's number and world size, and the port at which the ranks meet."""

    rank: int
    world_size: int
    meeting_port: int


class RankTask(Protocol):
    """A task for all ranks; its result is sent back."""

    def run(self, seat: SummingSeat) -> Any: ...


class SummingRanks:
    """Reductions over all ranks."""

    def max_(self, tensor: torch.Tensor) -> None:
        """Reduce to the maximum."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def sum_(self, tensor: torch.Tensor) -> None:
        """Reduce to the sum."""
        dist.all_reduce(tensor)

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start a sum; return the function that waits for it."""
        work = dist.all_reduce(tensor, async_op=True)
        return functools.partial(_wait, work)


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()


class _GivenGradient(torch.autograd.Function):
    """A loss of 0 with a given gradient: nothing else is computed."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None  # autograd may keep it, as one made just now
        return gradient, None


def _loss_of(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = _GivenGradient.apply(weight, gradient)  # type: ignore[no-untyped-call]
    return loss


def given_gradient(microbatch: int, elements: int, *, spread: bool) -> torch.Tensor:
    """Return a microbatch's gradient, float32, of one magnitude or, with ``spread``, of many.

    If magnitudes span decades, each element's magnitude is the same in all microbatches.
    """
    own = torch.Generator().manual_seed(microbatch + 1)
    found = torch.randn(elements, generator=own).mul_(1e-3)
    return found.mul_(_magnitudes(elements)) if spread else found


@functools.lru_cache(maxsize=1)
def _magnitudes(elements: int) -> torch.Tensor:
    of_all = torch.Generator().manual_seed(0)
    return torch.randn(elements, generator=of_all).mul_(2.0).exp_()


@dataclass(frozen=True, slots=True, kw_only=True)
class SummingWay:
    """The way of summing gradients, and their number."""

    exact: Exact
    elements: int
    microbatches: int
    spread: bool = False


class _GradientStep:
    """The gradients of a step, microbatch by microbatch."""

    def __init__(self, seat: SummingSeat, how: SummingWay) -> None:
        sizes = [len(part) for part in torch.empty(how.elements).tensor_split(PARAMETERS)]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self._given = [
            torch.split(given_gradient(each, how.elements, spread=how.spread), sizes)
            for each in range(seat.rank, how.microbatches, seat.world_size)
        ]
        self._gradients = Gradients(
            {"model": self.weights},
            SummingRanks(),
            microbatches=how.microbatches,
            exact=how.exact,
            bounds={},
        )

    def copies(self) -> list[list[torch.Tensor]]:
        """Return each microbatch's gradients as new tensors, as a backward pass makes them."""
        return [[part.clone() for part in given] for given in self._given]

    def make(self, copies: list[list[torch.Tensor]]) -> None:
        """Compute the mean gradient; take the tensors out of ``copies``."""
        self._gradients.begin_pass()
        for given in copies:
            self._gradients.begin_microbatch(last=given is copies[-1])
            losses = [_loss_of(weight, given.pop(0)) for weight in self.weights]
            self._gradients.backward(torch.stack(losses).sum())
        self._gradients.end_pass(backwards=len(copies))
        self._gradients.end_step()

    def mean(self) -> torch.Tensor:
        """Return the mean gradient, flat."""
        return torch.cat([weight.grad for weight in self.weights if weight.grad is not None])

    def clear(self) -> None:
        """Drop the gradients."""
        self._gradients.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Wall-clock seconds of a step's gradients, and of an all-reduce of as many bytes alone.

    ``processor_s`` is the processor time of the step on this rank.
    """

    steps_s: list[float]
    processor_s: list[float]
    alone_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingTask:
    """Time the gradients of a step ``repeat`` times."""

    how: SummingWay
    repeat: int

    def run(self, seat: SummingSeat) -> Times:
        """Return the times."""
        step, flat = _GradientStep(seat, self.how), torch.zeros(self.how.elements)
        found = Times(steps_s=[], processor_s=[], alone_s=[])
        for number in range(self.repeat + 2):
            make = functools.partial(step.make, step.copies())
            busy_s = time.process_time()
            step_s = _timed(make)
            busy_s = time.process_time() - busy_s
            step.clear()
            alone_s = _timed(lambda: dist.all_reduce(flat))
            if number >= 2:  # the first round measures the grid, both warm up
                found.steps_s.append(step_s)
                found.processor_s.append(busy_s)
                found.alone_s.append(alone_s)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Compute the gradients of one step."""

    how: SummingWay

    def run(self, seat: SummingSeat) -> Any:
        """Return the mean on rank 0, None on others."""
        step = _GradientStep(seat, self.how)
        step.make(step.copies())
        return step.mean().numpy() if seat.rank == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """Train a small model for ``steps`` steps."""

    exact: Exact
    steps: int
    microbatches: int

    def run(self, seat: SummingSeat) -> Any:
        """Return the weights on rank 0, None on others."""
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, _WIDTH)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        gradients = Gradients(
            {"model": model},
            SummingRanks(),
            microbatches=self.microbatches,
            exact=self.exact,
            bounds={},
        )
        for step in range(self.steps):
            gradients.begin_pass()
            own = range(seat.rank, self.microbatches, seat.world_size)
            for microbatch in own:
                gradients.begin_microbatch(last=microbatch == own[-1])
                gradients.backward(_loss(model, seed=step * self.microbatches + microbatch))
            gradients.end_pass(backwards=len(own))
            gradients.end_step()
            optimizer.step()
            gradients.clear()
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return flat.numpy() if seat.rank == 0 else None


def _loss(model: nn.Module, *, seed: int) -> torch.Tensor:
    """Return the error of the model's attempt to sort its input."""
    batch = torch.randn(16, _WIDTH, generator=torch.Generator().manual_seed(seed))
    return nn.functional.mse_loss(model(batch), batch.sort(dim=1).values)


def _timed(work: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def serve(seat: SummingSeat, pipe: Connection) -> None:
    """Run the tasks that arrive, on one thread, as a rank of a gloo group."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=_TIMEOUT_S)
    store = TCPStore("127.0.0.1", seat.meeting_port, is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo", store=store, rank=seat.rank, world_size=seat.world_size, timeout=timeout
    )
    while True:
        try:
            task: RankTask = pipe.recv()
        except EOFError:
            return
        pipe.send(task.run(seat))
