"""A run that records itself: inputs, draws, losses and gradients by microbatch, the state by step.

It also limits the number of steps, deals shares unevenly and dies on order, so that `holdfast
check` can compare the same script under different circumstances.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.ckpt.state.model_parts import ModelParts
from holdfast.elastic.channel.base import Channel
from holdfast.elastic.config import Settings
from holdfast.elastic.data.loaders import Loader
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.loop.run import Run
from holdfast.elastic.loop.trace import sources
from holdfast.elastic.loop.trace.carried import carried
from holdfast.elastic.loop.trace.digests import digest_of, draws, state_digests
from holdfast.elastic.loop.trace.records import (
    BETWEEN,
    FIRST,
    KEPT,
    PASSED,
    STEPPED,
    TRACE_ENV,
    CarriedSeen,
    ForeignUse,
    LoopEntered,
    LoopLeft,
    MicrobatchSeen,
    StateSeen,
    TraceRecord,
    TraceSettings,
    Use,
)
from holdfast.elastic.loop.user_code import is_users, line_of, user_frame, user_line
from holdfast.elastic.planning.shares import even

_PROTECTED_S: Final = 1.0
_POLL_S: Final = 0.01


class TracedRun(Run):
    """A `Run` that writes a trace; `TRACE_ENV` gives its settings."""

    def __init__(
        self, channel: Channel, settings: Settings, world: GenerationWorld, **parts: Any
    ) -> None:
        self._order = msgspec.json.decode(os.environ[TRACE_ENV], type=TraceSettings)
        if self._order.uneven and (shares := uneven_shares(settings, world)):
            world.record = msgspec.structs.replace(world.record, shares=shares)
        super().__init__(channel, settings, world, **parts)
        self._writer = TraceWriter(Path(self._order.folder))
        self._exact, self._microbatches = settings.exact, settings.batch.microbatches
        self._state: Mapping[str, Any] = {}
        self._place, self._at_step, self._phase, self._round = "build", -1, 0, 0
        self._at_microbatch, self._updates = -1, 0
        self._in_body = self._ended = False
        self._loss: torch.Tensor | None = None
        self._found: dict[str, str] = {}
        self._noted: set[tuple[str, ...]] = set()
        self._generators: set[int] = set()
        self._gradients_in_pass, self._previous = 0, -1
        sources.listen(
            self._note,
            stepped=self._on_update,
            scheduled=self._on_schedule,
            zeroed=self._on_zeroing,
        )

    # -- what the script does --------------------------------------------------------------------

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

    def track(self, **state: Any) -> None:
        """See `Run.track`."""
        super().track(**state)
        self._state = state

    def steps(self, count: int) -> Iterator[int]:
        """See `Run.steps`; at most as many as ordered."""
        yield from self._traced(super().steps(min(count, self._order.steps)))

    def epochs(self, count: int, loader: Loader) -> Iterator[int]:
        """See `Run.epochs`; at most as many steps as ordered."""
        if self.completed < self._order.steps:
            yield from self._traced(super().epochs(count, loader))

    def _traced(self, steps: Iterator[int]) -> Iterator[int]:
        self._enter()
        self._ended = False
        for step in steps:
            if step >= self._order.steps:  # of `epochs`, which knows no count
                break
            self._begin_record(step)
            yield step
            self._end_record()
        self._ended = True

    def _finish(self) -> None:
        """Record that this rank left the loop; called where the function has returned."""
        if self._in_body and self._phase:
            self._end_record()
        self._writer.write(LoopLeft(step=self._at_step, how="end" if self._ended else "early"))
        super()._finish()

    def microbatches(self, dataset: Any = None, **options: Any) -> Iterator[Any]:
        """See `Run.microbatches`."""
        self._die(FIRST)
        self._gradients_in_pass, self._previous = 0, -1
        for count, batch in enumerate(super().microbatches(dataset, **options)):
            if count:
                self._die(BETWEEN)
            number = self._number(count)
            yield from self._one(batch, number)
            self._previous = number
        self._place, self._at_microbatch = "step", -1
        self._round += 1
        self._die(PASSED)

    def _one(self, batch: Any, number: int) -> Iterator[Any]:
        self._place, self._at_microbatch = "microbatch", number
        self._loss, self._found = None, {}
        seen = digest_of(batch)
        line = user_line()
        with sources.ForeignGenerators(self._generators):
            yield batch
        loss = self._loss
        self._writer.write(
            MicrobatchSeen(
                step=self._at_step,
                phase=self._phase,
                round=self._round,
                microbatch=number,
                input=seen,
                draws=draws(),
                line=line,
                loss="" if loss is None else digest_of(loss),
                value=None if loss is None else float(loss.sum()),
                gradients=self._found,
            )
        )

    def _number(self, count: int) -> int:
        piece = self._piece
        return count if piece is None else piece.microbatch

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """See `Run.backward`; records the loss and each parameter's gradient of it alone."""
        self._loss = loss.detach()
        self._gradients_in_pass += 1
        hooks = [
            parameter.register_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters()
            if parameter.requires_grad and not isinstance(parameter, DTensor)
        ]
        try:
            super().backward(loss, **options)
        finally:
            for hook in hooks:
                hook.remove()

    def _on_gradient(self, name: str, gradient: torch.Tensor) -> None:
        self._found[name] = digest_of(gradient)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, value in self._state.items():
            for part in value if isinstance(value, ModelParts) else (value,):
                if isinstance(part, nn.Module):
                    for inner, parameter in part.named_parameters():
                        yield f"{name}.{inner}", parameter

    def step(self, *optimizers: Optimizer, **options: Any) -> None:
        """See `Run.step`."""
        super().step(*optimizers, **options)
        self._die(STEPPED)
        self._phase, self._round = self._phase + 1, 0

    # -- what is recorded ------------------------------------------------------------------------

    def _enter(self) -> None:
        frame = user_frame(sys._getframe(1))
        self._writer.begin(
            LoopEntered(
                stage=frame.f_code.co_name if frame else "",
                generation=self.generation,
                rank=super().rank,
                world=super().world_size,
                pid=os.getpid(),
                completed=self.completed,
                exact=self._exact,
                microbatches=self._microbatches,
                share=self.share,
            )
        )
        self._at_step = self.completed
        self._writer.write(
            StateSeen(step=self.completed, after=False, leaves=state_digests(self._state))
        )

    def _begin_record(self, step: int) -> None:
        self._at_step, self._phase, self._round, self._updates = step, 0, 0, 0
        self._place, self._in_body = "step", True
        if step == self._order.hold:
            self._hold()
        self._die(KEPT, before=1)
        known = {id(self), id(self._state), *map(id, self._state.values())}
        if (frame := user_frame(sys._getframe(1))) is not None:
            self._writer.write(CarriedSeen(step=step, values=carried(frame, known=known)))

    def _end_record(self) -> None:
        step, leaves = self._at_step, state_digests(self._state)
        self._writer.write(StateSeen(step=step, after=True, leaves=leaves, updates=self._updates))
        self._in_body, self._at_step = False, step + 1

    def _note_reading(self, what: str) -> None:
        frame = sys._getframe(2)
        if is_users(frame.f_code.co_filename):
            self._note("rank", line_of(frame), f"run.{what}")

    def _note(self, use: Use, line: str, detail: str) -> None:
        key = (use, line, self._place)
        if key in self._noted:
            return
        self._noted.add(key)
        self._writer.write(
            ForeignUse(
                use=use,
                line=line,
                detail=detail,
                place=self._place,
                step=self._at_step,
                microbatch=self._at_microbatch,
            )
        )

    def _on_update(self, optimizer: Optimizer, by_hand: str) -> None:
        self._updates += 1
        kind = type(optimizer).__name__
        if not self._tracks(optimizer):
            self._note("untracked optimizer", by_hand or user_line(), kind)
        elif by_hand:
            self._note("optimizer by hand", by_hand, kind)

    def _on_schedule(self, scheduler: LRScheduler) -> None:
        if self._place != "build" and not self._tracks(scheduler):
            self._note("untracked scheduler", user_line(), type(scheduler).__name__)

    def _on_zeroing(self, holder: Any, line: str) -> None:
        """Note that gradients are dropped in a pass that has made some."""
        if self._place != "microbatch" or not self._gradients_in_pass or not self._tracks(holder):
            return
        groups = holder.param_groups if isinstance(holder, Optimizer) else ()
        dropped = {id(p) for group in groups for p in group["params"]}
        dropped |= {id(p) for p in holder.parameters()} if isinstance(holder, nn.Module) else set()
        name = next((name for name, p in self._parameters() if id(p) in dropped), "")
        when = f"between microbatches {self._previous} and {self._at_microbatch}"
        if self._loss is not None:
            when = f"after microbatch {self._at_microbatch}"
        self._note(
            "zero_grad", line, f"of `{name}` vanished {when}" if name else f"vanished {when}"
        )

    def _tracks(self, value: Any) -> bool:
        return any(value is each for each in _leaves(self._state))

    # -- what happens on the way -----------------------------------------------------------------

    def _die(self, point: str, *, before: int = 0) -> None:
        """Die if it is this rank's turn at this point of the step ``before`` steps ago."""
        rank, last = super().rank, super().world_size - 1
        for death in self._order.deaths:
            due = (death.step, death.point) == (self._at_step - before, point)
            in_phase = point == KEPT or death.phase == self._phase
            if due and in_phase and rank == (0 if death.who == "first" else last):
                if point == KEPT:
                    self._await_protection()
                if self._writer.mark(f"death-{death.number}"):
                    os.kill(os.getpid(), signal.SIGKILL)

    def _await_protection(self) -> None:
        deadline_s = time.monotonic() + _PROTECTED_S
        while self.protection.step < self.completed and time.monotonic() < deadline_s:
            self.check()
            time.sleep(_POLL_S)

    def _hold(self) -> None:
        """Stop for good before a step; the command ends the whole job."""
        self._writer.mark("held")
        while True:
            self.check()
            time.sleep(_POLL_S)


class TraceWriter:
    """Writes the records of one rank in one generation, line by line, as they come.

    What comes before `begin` waits for it, because the first line names the rank.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._waiting = folder, list[TraceRecord]()
        self._file: int | None = None

    def begin(self, entered: LoopEntered) -> None:
        """Open the file of a rank that has come to its first step."""
        if self._file is None:
            name = f"{time.time_ns()}-{entered.generation}-{entered.rank}-{entered.pid}.trace"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._folder / name, flags, 0o644)
        self.write(entered)
        while self._waiting:
            self.write(self._waiting.pop(0))

    def write(self, record: TraceRecord) -> None:
        """Append one record."""
        if self._file is None:
            self._waiting.append(record)
        else:
            os.write(self._file, msgspec.json.encode(record) + b"\n")

    def mark(self, name: str) -> bool:
        """Make a file; return False if it exists already."""
        try:
            (self._folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def uneven_shares(settings: Settings, world: GenerationWorld) -> tuple[int, ...]:
    """Return shares of which the first is as large as possible; empty if there is no choice."""
    mesh, microbatches = world.record.mesh, settings.batch.microbatches
    if mesh.pp != 1 or mesh.ep != 1 or not 1 < mesh.dp < microbatches:
        return ()
    shares = (microbatches - mesh.dp + 1, *(1,) * (mesh.dp - 1))
    return () if shares == even(microbatches, mesh.dp) else shares


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        for value in state.values():
            yield from _leaves(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _leaves(value)
    else:
        yield state
