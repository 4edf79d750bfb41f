"""The recorder of one rank in one generation: what its loop computes and what it uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from holdfast.ckpt.state.kinds.model_parts import ModelParts
from holdfast.elastic.loop.trace import sources
from holdfast.elastic.loop.trace.carried import carried
from holdfast.elastic.loop.trace.digests import digest_of, draws, state_digests
from holdfast.elastic.loop.trace.records import (
    CarriedSeen,
    ForeignUse,
    LeafDigest,
    LoopLeft,
    MicrobatchSeen,
    StateSeen,
    Use,
)
from holdfast.elastic.loop.trace.writer import TraceWriter
from holdfast.elastic.loop.user_code import line_of, user_frame, user_line


class Recorder:
    """Follows a loop: ``step``, ``phase`` (its updates so far), and the pass within the phase.

    ``state`` is the tracked state of ``rank``; ``generators`` are the ids of the run's own
    generators.
    """

    def __init__(self, writer: TraceWriter, *, rank: int = 0) -> None:
        self.writer, self._rank = writer, rank
        self.state: Mapping[str, Any] = {}
        self.generators: set[int] = set()
        self.step, self.phase = -1, 0
        self.in_body = False
        self._first, self._passed_on = 0, dict[str, str]()
        self._round = self._backwards = self._updates = 0
        self._place, self._microbatch, self._previous = "build", -1, -1
        self._loss: torch.Tensor | None = None
        self._gradients: dict[str, str] = {}
        self._noted: set[tuple[str, ...]] = set()
        sources.listen(
            self.note, stepped=self._on_update, scheduled=self._on_schedule, zeroed=self._on_zeroing
        )

    # -- steps -----------------------------------------------------------------------------------

    def begin_generation(self, step: int) -> None:
        """Record the state from which a generation starts."""
        self.step = self._first = step
        self.writer.write(StateSeen(step=step, after=False, leaves=self._leaves()))

    def begin_step(self, step: int, frame: FrameType | None, *, known: set[int]) -> None:
        """Begin a step, and record the variables of the script's loop at ``frame``."""
        self.step, self.phase, self._round, self._updates = step, 0, 0, 0
        self._place, self.in_body = "step", True
        if frame is not None:
            ids = {*known, id(self.state), *map(id, self.state.values())}
            self.writer.write(CarriedSeen(step=step, values=carried(frame, known=ids)))

    def end_step(self) -> None:
        """Record the state after a step."""
        leaves = self._leaves()
        seen = StateSeen(step=self.step, after=True, leaves=leaves, updates=self._updates)
        self.writer.write(seen)
        self.in_body, self.step = False, self.step + 1

    def end_phase(self) -> None:
        """Note that run.step has applied a gradient."""
        self.phase, self._round = self.phase + 1, 0

    def leave(self, *, ended: bool) -> None:
        """Record that the function has returned, at the end of its loop or early."""
        if self.in_body and self.phase:
            self.end_step()
        self.writer.write(LoopLeft(step=self.step, how="end" if ended else "early"))

    def _leaves(self) -> dict[str, LeafDigest]:
        return state_digests(self.state, rank=self._rank)

    # -- passes ----------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begin a pass over microbatches."""
        self._backwards, self._previous, self._passed_on = 0, -1, {}

    def end_pass(self) -> None:
        """End it."""
        self._place, self._microbatch = "step", -1
        self._round += 1

    def microbatch(self, batch: Any, number: int) -> Iterator[Any]:
        """Yield a batch to the script, and record what the script does with it."""
        self._place, self._microbatch = "microbatch", number
        self._loss, self._gradients = None, {}
        seen, frame = digest_of(batch), user_frame()
        line = line_of(frame)
        self._note_carried(frame)
        with sources.ForeignGenerators(self.generators):
            yield batch
        loss = self._loss
        self.writer.write(
            MicrobatchSeen(
                step=self.step,
                phase=self.phase,
                round=self._round,
                microbatch=number,
                input=seen,
                draws=draws(),
                line=line,
                loss="" if loss is None else digest_of(loss),
                value=None if loss is None else float(loss.sum()),
                gradients=self._gradients,
            )
        )
        self._previous = number

    def _note_carried(self, frame: FrameType | None) -> None:
        """Note the variables that microbatches pass on to each other; in the first steps only."""
        if frame is None or self.step > self._first + 1:
            return
        known = {id(self.state), *map(id, self.state.values())}
        values, before = carried(frame, known=known, states=False), self._passed_on
        for name, text in values.items():
            if before.get(name, text) != text:
                self.note("carried", line_of(frame), name)
        self._passed_on = values

    def begin_backward(self, loss: torch.Tensor) -> list[RemovableHandle]:
        """Record a loss; return hooks, to be removed, that record each parameter's gradient."""
        self._loss = loss.detach()
        self._backwards += 1
        return [
            parameter.register_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters()
            if parameter.requires_grad and not isinstance(parameter, DTensor)
        ]

    def _on_gradient(self, name: str, gradient: torch.Tensor) -> None:
        self._gradients[name] = digest_of(gradient)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, value in self.state.items():
            for part in value if isinstance(value, ModelParts) else (value,):
                if isinstance(part, nn.Module):
                    for inner, parameter in part.named_parameters():
                        yield f"{name}.{inner}", parameter

    # -- what is not the run's -------------------------------------------------------------------

    def note(self, use: Use, line: str, detail: str) -> None:
        """Record a use, once for each line and place."""
        key = (use, line, self._place, detail if use == "carried" else "")
        if key in self._noted:
            return
        self._noted.add(key)
        self.writer.write(
            ForeignUse(
                use=use,
                line=line,
                detail=detail,
                place=self._place,
                step=self.step,
                microbatch=self._microbatch,
            )
        )

    def _on_update(self, optimizer: Optimizer, by_hand: str) -> None:
        kind = type(optimizer).__name__
        if not self._tracks(optimizer):  # one of a microbatch's own is made where that is run
            self.note("untracked optimizer", by_hand or user_line(), kind)
            return
        self._updates += 1
        if by_hand:
            self.note("optimizer by hand", by_hand, kind)

    def _on_schedule(self, scheduler: LRScheduler) -> None:
        if self._place != "build" and not self._tracks(scheduler):
            self.note("untracked scheduler", user_line(), type(scheduler).__name__)

    def _on_zeroing(self, holder: Any, line: str) -> None:
        """Note that gradients are dropped in a pass that has made some."""
        if self._place != "microbatch" or not self._backwards or not self._tracks(holder):
            return
        groups = holder.param_groups if isinstance(holder, Optimizer) else ()
        dropped = {id(p) for group in groups for p in group["params"]}
        dropped |= {id(p) for p in holder.parameters()} if isinstance(holder, nn.Module) else set()
        name = next((name for name, p in self._parameters() if id(p) in dropped), "")
        when = f"between microbatches {self._previous} and {self._microbatch}"
        if self._loss is not None:
            when = f"after microbatch {self._microbatch}"
        self.note("zero_grad", line, f"of `{name}` vanished {when}" if name else f"vanished {when}")

    def _tracks(self, value: Any) -> bool:
        return any(value is each for each in _leaves(self.state))


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        for value in state.values():
            yield from _leaves(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _leaves(value)
    else:
        yield state
