"""What the decorated function is given: its world, its steps, its share of the work."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import default_collate

from ckpt.sidecar.client import SidecarClient
from ckpt.transport import RunKey
from ckpt.types import Json
from elastic import randomness
from elastic.channel import Channel, Phase
from elastic.config import Settings
from elastic.errors import ConfigError, JobFailed
from elastic.gradients import Gradients
from elastic.keeper import Keeper
from elastic.metrics import Metrics
from elastic.protection import Protection
from elastic.pulse import Pulse
from elastic.records import Roster
from elastic.reduce import exact_norm
from elastic.reform import World
from elastic.sampler import positions, sample_indices, share

_MAX_PASSES = 3
_Sample_co = TypeVar("_Sample_co", covariant=True)


class Samples(Protocol[_Sample_co]):
    """A map-style data set."""

    def __len__(self) -> int:
        """Return how many samples there are."""

    def __getitem__(self, index: int, /) -> _Sample_co:
        """Return one of them."""


class Run:
    """One generation's view of the run; a new one is made whenever the world changes.

    ``mesh`` is the mesh of ranks (axis ``"dp"``), ``seed`` the run's, ``completed`` the number
    of completed steps, ``metrics`` the values last logged.
    """

    def __init__(
        self, channel: Channel, settings: Settings, world: World, *, pulse: Pulse, keeper: Keeper
    ) -> None:
        self._channel, self._settings, self._world = channel, settings, world
        self._pulse, self._keeper = pulse, keeper
        self._gradients: Gradients | None = None
        self._logs = Metrics(settings.batch.microbatches)
        self._microbatch: int | None = None
        self._backwards = 0
        self._has_gradients = self._in_step = self._stepped = False
        self._resumed = False
        self._began = (0.0, 0.0)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of this generation's ranks."""
        return self._world.mesh

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world.size

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def generation(self) -> int:
        """The generation's number."""
        return self._world.generation

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self._settings.seed

    @property
    def completed(self) -> int:
        """How many steps are complete."""
        return self._keeper.cursor.step

    @property
    def metrics(self) -> dict[str, float]:
        """The values last logged; part of the state, so there after a restore too."""
        return dict(self._keeper.cursor.metrics)

    @property
    def sidecar(self) -> SidecarClient:
        """The client of this node's sidecar."""
        return self._keeper.client

    @property
    def key(self) -> RunKey:
        """The run's key."""
        return self._channel.key

    def roster(self) -> Roster:
        """Return the whole job as last heard."""
        return self._channel.roster()

    def emit(self, kind: str, **fields: Json) -> None:
        """Record an event."""
        self._channel.emit(kind, **fields)

    def check(self) -> None:
        """Raise ``Fenced`` when this generation is over; call it in long work of your own."""
        self._pulse.beat()
        self._world.guard.check()

    def track(self, **state: Any) -> None:
        """Name the state to keep, and restore it in place where there is something to restore.

        ``state``: modules, optimizers, objects with ``state_dict``/``load_state_dict``, tensors
        and plain values. Raises ``ConfigError`` when a setting contradicts the saved run's, and
        ``ckpt``'s ``MismatchError`` when the saved state is another model's.
        """
        if self._gradients is not None:
            raise ConfigError("run.track was called twice; name all state in one call")
        with self._pulse.phase(Phase.IDLE):
            self._keeper.track(state)
        self._gradients = Gradients(
            {name: value for name, value in state.items() if isinstance(value, nn.Module)},
            self._world,
            microbatches=self._settings.batch.microbatches,
            exact=self._settings.exact,
            bounds=self._keeper.cursor.bounds,
            check=self._world.guard.check,
        )
        for value in state.values():
            if isinstance(value, Optimizer):
                value.register_step_pre_hook(lambda *_: self._keeper.fence())

    def steps(self, count: int) -> Iterator[int]:
        """Yield the number of each step still to do until ``count`` are complete.

        The whole body belongs to the step and must depend only on the tracked state and the
        step's number: after a failure it is run again from the last complete step.
        """
        self._tracked()
        self._keeper.begin(count)
        while self.completed < count:
            self._begin_step()
            yield self.completed
            self._end_step(last=self.completed + 1 >= count)

    def _tracked(self) -> Gradients:
        if self._gradients is None:
            raise ConfigError("call run.track(model=..., optimizer=...) before the first step")
        return self._gradients

    def _begin_step(self) -> None:
        self.check()
        self._in_step, self._stepped, self._has_gradients = True, False, False
        self._began = (time.time(), time.perf_counter())
        self._pulse.set(Phase.COMPUTE, step=self.completed)
        self._seed(randomness.step_seed(self.seed, step=self.completed, after_microbatches=False))

    def _end_step(self, *, last: bool) -> None:
        if not self._stepped:
            raise ConfigError(
                f"step {self.completed} ended without run.step(optimizer): call it once per step"
            )
        self._in_step = False
        cursor = self._keeper.cursor
        cursor.metrics.update(self._logs.latest)
        cursor.step += 1
        self._keeper.keep(last=last)
        protection = self.protection
        start, began = self._began
        self.emit(
            "step",
            step=cursor.step,
            generation=self.generation,
            rank=self.rank,
            start=start,
            seconds=time.perf_counter() - began,
            stall_s=self._keeper.stall_s(),
            protected=protection.step,
            unprotected_s=round(protection.age_s, 6),
            copied_bytes=protection.copied_bytes,
            discarded=protection.discarded,
            waited_s=self._world.guard.take_waited_s(),
        )
        if self.is_leader:
            if self._logs.latest:
                self.emit("metric", step=cursor.step, **self._logs.latest)
            if not self._resumed:
                self.emit("resumed", generation=self.generation, step=cursor.step)
        self._resumed = True
        self._logs.clear()
        self._pulse.set(Phase.IDLE, step=cursor.step)

    @overload
    def microbatches(self) -> Iterator[int]: ...
    @overload
    def microbatches(self, dataset: Samples[Any]) -> Iterator[Any]: ...
    def microbatches(self, dataset: Samples[Any] | None = None) -> Iterator[Any]:
        """Yield this rank's microbatches of the step: collated samples, or their indices.

        Each is seeded on its own. With ``exact`` the pass is repeated in the rare case that a
        gradient outgrew its grid; when the loop ends, every ``.grad`` is the mean over all
        microbatches of all ranks.
        """
        gradients = self._tracked()
        if not self._in_step:
            raise ConfigError("run.microbatches belongs inside `for step in run.steps(...)`")
        total = self._settings.batch.microbatches
        mine = share(total, rank=self.rank, world_size=self.world_size)
        if not mine:
            raise ConfigError(
                f"{total} microbatches cannot be shared by {self.world_size} ranks: raise "
                "Batch(microbatches=...), or limit the world"
            )
        for _ in range(_MAX_PASSES):
            gradients.begin_pass()
            self._logs.begin_pass()
            self._backwards = 0
            for index in mine:
                gradients.begin_microbatch(last=index == mine[-1])
                self._begin_microbatch(index)
                yield index if dataset is None else self._samples(dataset, index)
            self._microbatch = None
            if self._end_pass(len(mine)):
                return
        raise JobFailed(
            f"step {self.completed}: the gradients grew {_MAX_PASSES} times over: what a "
            "microbatch computes must depend on nothing but the tracked state and the microbatch"
        )

    def _begin_microbatch(self, index: int) -> None:
        self.check()
        self._microbatch = index
        self._seed(randomness.microbatch_seed(self.seed, step=self.completed, microbatch=index))

    def _end_pass(self, count: int) -> bool:
        if self._backwards not in (0, count):
            raise ConfigError(
                f"run.backward was called {self._backwards} times in {count} microbatches: call "
                "it once in each (add up the losses of one microbatch first)"
            )
        if self._backwards and self._has_gradients:
            raise ConfigError("one pass of microbatches per step may call run.backward")
        agree = self._logs.signature(self._backwards > 0)
        if not self._tracked().end_pass(backwards=self._backwards, agree=agree):
            self.emit("regrid", step=self.completed, generation=self.generation, rank=self.rank)
            return False
        self._has_gradients = self._has_gradients or self._backwards > 0
        self._logs.end_pass(self._world)
        self._seed(randomness.step_seed(self.seed, step=self.completed, after_microbatches=True))
        return True

    def _samples(self, dataset: Samples[Any], microbatch: int) -> Any:
        batch = self._settings.batch
        wanted = positions(
            step=self.completed,
            microbatch=microbatch,
            microbatches=batch.microbatches,
            size=batch.size,
        )
        indices = sample_indices(wanted, samples=len(dataset), seed=self.seed)
        return default_collate([dataset[index] for index in indices])

    def _seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this microbatch's loss (its mean over the microbatch's samples)."""
        if self._microbatch is None:
            raise ConfigError("run.backward belongs inside `for ... in run.microbatches(...)`")
        self._backwards += 1
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, *optimizers: Optimizer) -> None:
        """Apply the mean gradient and drop it: once per step, after the microbatches."""
        if not optimizers:
            raise ConfigError("run.step needs the optimizer: run.step(optimizer)")
        if not self._has_gradients or self._stepped:
            raise ConfigError(
                "run.step follows a complete pass over run.microbatches with run.backward, once "
                "per step"
            )
        self.check()
        self._keeper.fence()
        for optimizer in optimizers:
            optimizer.step()
        self._tracked().clear()
        self._stepped = True

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Scale the gradients to a 2-norm of at most ``max_norm``; return the norm before.

        The norm is the same for any world size, bit for bit.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        whole = [g for g in gradients if not isinstance(g, DTensor)]
        parts = [g.to_local() for g in gradients if isinstance(g, DTensor)]
        norm = exact_norm(
            parts + (whole if self.is_leader else []),
            terms=max(1, sum(gradient.numel() for gradient in gradients)),
            reduce_max=self._world.max_,
            reduce_sum=self._world.sum_,
        )
        if norm > max_norm:
            scale = max_norm / norm
            with torch.no_grad():
                torch._foreach_mul_(parts + whole, scale)
        return norm

    def fence(self) -> None:
        """Wait for the snapshot being copied: call it before changing tracked tensors by hand.

        ``run.step`` and every tracked optimizer do so by themselves. A change without it, as of
        parameters under ``torch.no_grad()``, is noticed, and the snapshot under way is discarded:
        `protection` names the tensor.
        """
        self._keeper.fence()

    @property
    def protection(self) -> Protection:
        """How well this run is protected: the newest restore point, its age, what it cost.

        Reading it costs nothing. Raises ``ConfigError`` before `track`.
        """
        return self._keeper.protection()

    def log(self, **values: float | torch.Tensor) -> None:
        """Record numbers of this step; inside a microbatch, its part of their mean over all."""
        self._logs.add(self._microbatch, values)

    def finish(self) -> None:
        """Make the last step durable where asked for, and wait for all ranks (the loop does)."""
        if self._in_step and self._stepped:
            self._end_step(last=True)  # the loop was left by `break`
        self._pulse.set(Phase.WAIT, step=self.completed)
        self._keeper.finish()
        self._world.barrier()

    def close(self) -> None:
        """Let go of everything that holds the model."""
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None
        self._keeper.close()
