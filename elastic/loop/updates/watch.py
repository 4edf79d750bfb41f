"""The one place through which a run makes its updates and refuses all others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.elastic.config import Exact
from holdfast.elastic.errors import ConfigError, NotFiniteError
from holdfast.elastic.gradients.vanishing import GradientWatch
from holdfast.elastic.gradients.wrapped import Parameters
from holdfast.elastic.loop.updates.draws import DrawWatch
from holdfast.elastic.loop.updates.evaluations import UpdateSkippedError
from holdfast.elastic.loop.updates.interposed import Interposed
from holdfast.elastic.loop.updates.norms import refuse_partial_norms
from holdfast.elastic.loop.updates.optimizers import OptimizerWatch, refuse_shards
from holdfast.elastic.loop.updates.scaling import ScalerWatch
from holdfast.elastic.loop.updates.schedulers import SchedulerWatch
from holdfast.elastic.loop.updates.tracked_objects import TrackedObjects, parameters_of
from holdfast.elastic.loop.user_code import user_line
from holdfast.elastic.tracked.steady import SteadyState


@dataclass(slots=True, kw_only=True)
class _Watches:
    roster: TrackedObjects
    gradients: GradientWatch
    optimizers: OptimizerWatch
    scalers: ScalerWatch
    steady: SteadyState
    draws: DrawWatch | None


class UpdateWatch:
    """The updates of one run. Every method raises ``ConfigError``, naming what is wrong and where.

    ``stages`` is the number of pipeline stages, ``exact`` the setting. The watch begins when it is
    made, because the training function makes schedulers before `track`. `close` removes every hook.
    """

    def __init__(self, *, stages: int, exact: Exact) -> None:
        self._stages, self._exact = stages, exact
        self._interposed = Interposed()
        refuse_partial_norms(self._interposed, stages=stages, exact=exact)
        self._schedulers = SchedulerWatch(self._interposed)
        self._watches: _Watches | None = None
        self._step: int | None = None
        self._infinite: NotFiniteError | None = None
        self._updated_at = ""

    def track(
        self,
        state: Mapping[str, Any],
        parameters: Callable[[], Parameters],
        *,
        moves: bool,
        of_leader: Collection[str] = (),
    ) -> None:
        """Learn the tracked objects; see `SteadyState` for the other arguments."""
        roster = TrackedObjects(state, parameters)
        roster.refuse_foreign()
        gradients = GradientWatch(parameters, moves=moves, line=user_line)

        def in_pass() -> bool:
            return gradients.in_pass

        def on_zero_grad(owner: nn.Module | Optimizer, *_: object, **__: object) -> None:
            gradients.zeroing(owner, user_line())

        for owner in (nn.Module, Optimizer):
            self._interposed.before(owner, "zero_grad", on_zero_grad)
        self._watches = _Watches(
            roster=roster,
            gradients=gradients,
            optimizers=OptimizerWatch(roster, place=lambda: self._step, in_pass=in_pass),
            scalers=ScalerWatch(roster, self._interposed, in_pass=in_pass),
            steady=SteadyState(
                state, parameters, moves=moves, objects=bool(self._exact), of_leader=of_leader
            ),
            draws=DrawWatch(state) if self._exact else None,
        )
        self._schedulers.tracked()

    @property
    def _known(self) -> _Watches:
        if self._watches is None:
            raise ConfigError("call run.track(model=..., optimizer=...) before the first step")
        return self._watches

    def begin(self) -> None:
        """Look at the schedulers, before the first step."""
        self._schedulers.refuse_untracked(self._known.roster)

    def begin_step(self, step: int) -> None:
        """Note the number of the step that begins."""
        self._step, self._infinite, self._updated_at = step, None, ""
        self._known.gradients.reset()
        self._known.scalers.reset()

    def end_step(self) -> None:
        """Note that the step is over."""
        self._step = None

    def begin_pass(self, *, phase: int, fresh: bool) -> None:
        """Start a pass over microbatches; a ``fresh`` one has no gradients yet."""
        self._known.gradients.begin_pass(phase=phase, fresh=fresh)
        self._known.steady.begin_pass(step=self._step or 0, phase=phase)
        if (draws := self._known.draws) is not None:
            draws.begin_pass(phase=phase)
        if fresh:
            self._infinite, self._updated_at = None, ""

    def before_backward(self) -> None:
        """Refuse gradients that something else made or dropped."""
        self._known.gradients.refuse_changes()

    after_microbatch = before_backward

    def begin_body(self) -> None:
        """Note, where the loop's body begins, what it must leave as it is."""
        if (draws := self._known.draws) is not None:
            draws.begin_body(sys._getframe(1))

    def end_body(self, microbatch: int) -> None:
        """Refuse draws from generators of the script's own, after the body of this microbatch."""
        if (draws := self._known.draws) is not None:
            draws.end_body(microbatch)

    def after_backward(self) -> None:
        """Note the gradients that ``run.backward`` made."""
        self._known.gradients.saw_backward()

    def end_pass(self) -> None:
        """Note that the mean gradients are in place. Refuse changes of other tracked state."""
        self._known.gradients.end_pass()
        self._known.steady.end_pass()
        if (draws := self._known.draws) is not None:
            draws.end_pass()

    def defers(self, error: NotFiniteError) -> bool:
        """Return whether the update decides about gradients that are not finite: by its scaler."""
        if self._known.scalers.is_used:
            self._infinite = error
        return self._infinite is not None

    def refuse_second(self) -> None:
        """Refuse an update for which there is no mean gradient."""
        first = self._updated_at
        raise ConfigError(
            f"run.step at {user_line()} follows that at {first} without a pass in between, and "
            "each pass makes one update: give all its optimizers to one call, as run.step(a, b)"
            if first
            else "run.step follows a complete pass over run.microbatches with run.backward, once "
            "per pass: give all optimizers of the pass to one run.step(a, b)"
        )

    def apply(
        self,
        optimizers: Sequence[Any],
        *,
        scaler: Any,
        skips: bool,
        fence: Callable[[Any], None],
        agree: Callable[[torch.Tensor], None],
    ) -> None:
        """Make one update with all ``optimizers``, or none if the step ``skips`` it.

        ``fence`` is called for each before it steps; ``agree`` is as for `ScalerWatch.apply`.
        Raises ``NotFiniteError`` where there is no scaler to skip for.
        """
        watches = self._known
        self._schedulers.refuse_untracked(watches.roster)
        watches.optimizers.refuse_untracked(optimizers)
        watches.optimizers.refuse_closures(optimizers)
        if scaler is None:
            if self._infinite is not None and not watches.scalers.has_scaled:
                raise self._infinite
            watches.scalers.refuse_missing()
        else:
            watches.scalers.refuse_unfit(scaler, stages=self._stages)
        if not skips:
            for optimizer in filter(_is_torch, optimizers):
                watches.gradients.refuse_dropped(parameters_of(optimizer))
            with watches.optimizers.applying() as apply:
                for optimizer in optimizers:
                    fence(optimizer)
                if scaler is not None and scaler.is_enabled():
                    watches.scalers.apply(scaler, optimizers, apply=apply, agree=agree)
                else:
                    for optimizer in optimizers:
                        apply(optimizer, optimizer.step)
        elif scaler is not None:
            watches.scalers.drop(scaler)
        self._end_update()

    def minimize(
        self,
        optimizer: Any,
        evaluate: Callable[[], torch.Tensor],
        *,
        fence: Callable[[Any], None],
    ) -> None:
        """Make one update with an optimizer that calls ``evaluate`` for the loss and gradients."""
        watches = self._known
        self._schedulers.refuse_untracked(watches.roster)
        watches.optimizers.refuse_untracked([optimizer], call="run.minimize")
        if not isinstance(optimizer, Optimizer):
            raise ConfigError("run.minimize needs a torch optimizer and a closure")
        refuse_shards(watches.roster.name(optimizer), optimizer)
        fence(optimizer)
        with watches.optimizers.applying() as apply, contextlib.suppress(UpdateSkippedError):
            apply(optimizer, lambda: optimizer.step(evaluate))  # type: ignore[arg-type]
        self._end_update()

    def evaluated(self, optimizer: Optimizer) -> None:
        """Refuse an evaluation whose gradients the optimizer cannot use."""
        watches = self._known
        if watches.scalers.has_scaled:
            raise ConfigError(
                "run.minimize does not fit a GradScaler, as torch's own closures do not: compute "
                "the loss in float32 or bfloat16, without scaler.scale"
            )
        if self._infinite is not None:  # a scaler is tracked, and has no part in this update
            raise self._infinite
        watches.gradients.refuse_dropped(parameters_of(optimizer))

    def _end_update(self) -> None:
        self._known.gradients.reset()
        self._known.scalers.reset()
        self._updated_at = user_line()

    def close(self) -> None:
        """Remove every hook, and forget the tracked objects."""
        self._interposed.close()
        if self._watches is not None:
            self._watches.optimizers.close()
            self._watches = None


def _is_torch(optimizer: object) -> bool:
    return isinstance(optimizer, Optimizer)
