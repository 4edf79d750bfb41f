"""A run that records itself: inputs, draws, losses and gradients by microbatch, the state by step.

It also limits the number of steps, deals shares unevenly and dies on order, so that `holdfast
check` can compare the same script under different circumstances.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch.optim import Optimizer

from holdfast.elastic.channel.base import Channel
from holdfast.elastic.config import Settings
from holdfast.elastic.data.loaders import Loader
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.loop.run import Run
from holdfast.elastic.loop.trace.digests import has_own
from holdfast.elastic.loop.trace.recorder import Recorder
from holdfast.elastic.loop.trace.records import (
    BETWEEN,
    FIRST,
    KEPT,
    PASSED,
    STEPPED,
    TRACE_ENV,
    LoopEntered,
    TraceSettings,
)
from holdfast.elastic.loop.trace.writer import TraceWriter
from holdfast.elastic.loop.user_code import is_users, line_of, user_frame
from holdfast.elastic.planning.shares import even

_PROTECTED_S: Final = 1.0
_COMPLETE_S: Final = 60.0
_POLL_S: Final = 0.01


class TracedRun(Run):
    """A `Run` that writes a trace; `TRACE_ENV` gives its settings."""

    def __init__(
        self, channel: Channel, settings: Settings, world: GenerationWorld, **parts: Any
    ) -> None:
        self._trace_order = msgspec.json.decode(os.environ[TRACE_ENV], type=TraceSettings)
        if self._trace_order.uneven and (shares := uneven_shares(settings, world)):
            world.record = msgspec.structs.replace(world.record, shares=shares)
        super().__init__(channel, settings, world, **parts)
        self._trace = Recorder(TraceWriter(Path(self._trace_order.folder)), rank=super().rank)
        self._trace_settings = settings
        self._trace_ended, self._trace_stage, self._trace_by_world = False, "", False

    @property
    def rank(self) -> int:
        """See `Run.rank`."""
        self._note_reading("rank")
        return super().rank

    @property
    def world_size(self) -> int:
        """See `Run.world_size`."""
        self._note_reading("world_size")
        return super().world_size

    @property
    def share(self) -> int:
        """See `Run.share`."""
        self._note_reading("share")
        return super().share

    def _note_reading(self, what: str) -> None:
        frame = sys._getframe(2)
        if is_users(frame.f_code.co_filename):
            self._trace.note("rank", line_of(frame), f"run.{what}")

    def track(self, **state: Any) -> None:
        """See `Run.track`."""
        super().track(**state)
        self._trace.state = state

    def steps(self, count: int) -> Iterator[int]:
        """See `Run.steps`; at most as many as ordered."""
        yield from self._traced(super().steps(min(count, self._trace_order.steps)))

    def epochs(self, count: int, loader: Loader) -> Iterator[int]:
        """See `Run.epochs`; at most as many steps as ordered."""
        if self.completed < self._trace_order.steps:
            yield from self._traced(super().epochs(count, loader))

    def _traced(self, steps: Iterator[int]) -> Iterator[int]:
        recorder, self._trace_ended = self._trace, False
        self._enter(user_frame(sys._getframe(1)))
        for step in steps:
            if step == self._trace_order.hold:
                self._hold()
            self._await_ranks(step)
            frame = user_frame(sys._getframe(1))
            recorder.begin_step(step, frame, known={id(self)})
            self._die(KEPT, before=1)
            yield step
            recorder.end_step()
            if step + 1 >= self._trace_order.steps:
                self.stop()  # `epochs` knows no count
        self._trace_ended = True

    def _enter(self, frame: Any) -> None:
        self._trace_stage = frame.f_code.co_name if frame else ""
        per_rank, exact = has_own(self._trace.state), self._trace_settings.exact
        self._trace_by_world = per_rank and not exact
        self._trace.writer.begin(
            LoopEntered(
                stage=self._trace_stage,
                generation=self.generation,
                rank=super().rank,
                world=super().world_size,
                pid=os.getpid(),
                completed=self.completed,
                exact=exact,
                microbatches=self._trace_settings.batch.microbatches,
                share=super().share,
                per_rank=per_rank,
            )
        )
        self._trace.begin_generation(self.completed)

    def microbatches(self, dataset: Any = None, **options: Any) -> Iterator[Any]:
        """See `Run.microbatches`."""
        self._die(FIRST)
        self._trace.begin_pass()
        for count, batch in enumerate(super().microbatches(dataset, **options)):
            if count:
                self._die(BETWEEN)
            if (piece := self._passes.piece) is not None and not piece.samples:
                yield batch  # it stands in for a microbatch that has no samples
            else:
                yield from self._trace.microbatch(batch, self.microbatch)
        self._trace.end_pass()
        self._die(PASSED)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """See `Run.backward`."""
        hooks = self._trace.begin_backward(loss)
        try:
            super().backward(loss, **options)
        finally:
            for hook in hooks:
                hook.remove()

    def step(self, *optimizers: Optimizer, **options: Any) -> None:
        """See `Run.step`."""
        super().step(*optimizers, **options)
        self._die(STEPPED)
        self._trace.end_phase()

    def minimize(self, optimizer: Optimizer, closure: Callable[[], object]) -> float:
        """See `Run.minimize`."""
        loss = super().minimize(optimizer, closure)
        self._die(STEPPED)
        self._trace.end_phase()
        return loss

    def generator(self, name: str = "", *, device: torch.device | str = "cpu") -> torch.Generator:
        """See `Run.generator`."""
        made = super().generator(name, device=device)
        self._trace.generators.add(id(made))
        return made

    def _finish(self) -> None:
        self._trace.leave(ended=self._trace_ended)
        super()._finish()

    def _close(self) -> None:
        self._trace.writer.close()
        super()._close()

    # -- what happens on the way -----------------------------------------------------------------

    def _die(self, point: str, *, before: int = 0) -> None:
        """Die if it is this rank's turn at this point of the step ``before`` steps ago."""
        rank, last = super().rank, super().world_size - 1
        for death in self._trace_order.deaths:
            due = (death.step, death.point) == (self._trace.step - before, point)
            due = due and death.stage in ("", self._trace_stage)
            in_phase = point == KEPT or death.phase == self._trace.phase
            if due and in_phase and rank == (0 if death.who == "first" else last):
                if point == KEPT:
                    self._await_protection()
                if self._trace.writer.mark(f"death-{death.number}"):
                    os.kill(os.getpid(), signal.SIGKILL)

    def _await_ranks(self, step: int) -> None:
        """Wait, if a death is due in this step, until all ranks are there again: for a while.

        Wait in every step if results may depend on their number.
        """
        order, deadline_s = self._trace_order, time.monotonic() + _COMPLETE_S
        due = any(
            death.step + (death.point == KEPT) == step
            and death.stage in ("", self._trace_stage)
            and not self._trace.writer.is_marked(f"death-{death.number}")
            for death in order.deaths
        )
        due = due or (bool(order.deaths) and self._trace_by_world)
        while due and super().world_size < order.ranks and time.monotonic() < deadline_s:
            self.check()
            time.sleep(_POLL_S)

    def _await_protection(self) -> None:
        deadline_s = time.monotonic() + _PROTECTED_S
        while self.protection.step < self.completed and time.monotonic() < deadline_s:
            self.check()
            time.sleep(_POLL_S)

    def _hold(self) -> None:
        """Stop for good before a step; the command ends the whole job."""
        self._trace.writer.mark("held")
        while True:
            self.check()
            time.sleep(_POLL_S)


def uneven_shares(settings: Settings, world: GenerationWorld) -> tuple[int, ...]:
    """Return shares of which the first is as large as possible; empty if there is no choice."""
    mesh, microbatches = world.record.mesh, settings.batch.microbatches
    if mesh.pp != 1 or mesh.ep != 1 or not 1 < mesh.dp < microbatches:
        return ()
    shares = (microbatches - mesh.dp + 1, *(1,) * (mesh.dp - 1))
    return () if shares == even(microbatches, mesh.dp) else shares
