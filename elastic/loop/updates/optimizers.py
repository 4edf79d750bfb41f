"""A watch over every step of every torch optimizer while the decorated function runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.updates.tracked_objects import TrackedObjects, parameters_of
from holdfast.elastic.loop.user_code import user_frame, user_line


class OptimizerWatch:
    """Refuses steps that the run would lose, double or not see.

    ``place`` returns the number of the step under way, None outside steps; ``in_pass`` whether a
    pass over microbatches is. Every method raises ``ConfigError`` with the optimizer's name and the
    line of the script.
    """

    def __init__(
        self,
        roster: TrackedObjects,
        *,
        place: Callable[[], int | None],
        in_pass: Callable[[], bool],
    ) -> None:
        self._roster, self._place, self._in_pass = roster, place, in_pass
        self._tracked_sizes = {name: _sizes(each) for name, each in roster.optimizers}
        self._own: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._applied: object | None = None
        self._stepped: list[Optimizer] = []
        self._inner: list[Optimizer] = []
        self._handle: RemovableHandle | None = register_optimizer_step_pre_hook(self._before_step)

    def describe(self, optimizer: object) -> str:
        """Return a name for an optimizer: the tracked one, or that of the script's variable."""
        if name := self._roster.name(optimizer):
            return name
        frame = user_frame()
        names = {} if frame is None else {**frame.f_globals, **frame.f_locals}
        name = next((name for name, each in names.items() if each is optimizer), "")
        kind = type(optimizer).__name__
        return f"{name} ({kind})" if name else f"this {kind}"

    def refuse_untracked(self, optimizers: Sequence[object], *, call: str = "run.step") -> None:
        """Refuse optimizers that ``call`` was given, and ``run.track`` was not."""
        for optimizer in optimizers:
            name = self._roster.name(optimizer)
            if name and isinstance(optimizer, Optimizer):
                self._roster.refuse_foreign_of(name, optimizer)
                self._refuse_grown(name, optimizer)
            elif isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"{call} at {user_line()}: the optimizer {self.describe(optimizer)} is not "
                    "tracked, so its state and its steps are lost in a restore: name it in "
                    "run.track, with the module whose parameters it steps"
                )
            elif not callable(getattr(optimizer, "step", None)):
                raise ConfigError(
                    f"{call} at {user_line()} was given a {type(optimizer).__name__}: give it the "
                    "tracked optimizers"
                )

    def _refuse_grown(self, name: str, optimizer: Optimizer) -> None:
        """Refuse parameters that an optimizer got after it was tracked: a restore lacks them."""
        if _sizes(optimizer) != self._tracked_sizes[name]:
            raise ConfigError(
                f"run.step at {user_line()}: the parameters of the optimizer {name} are others "
                "than when run.track was called, and a restore, which builds it anew, has no place "
                "for their state: give it all parameters and groups before run.track, and freeze "
                "those that train later by requires_grad_(False); without a gradient they are left "
                "out, and a restore keeps what is frozen"
            )

    def refuse_closures(self, optimizers: Sequence[object]) -> None:
        """Refuse optimizers that cannot step without a closure."""
        for optimizer in optimizers:
            parameters = inspect.signature(optimizer.step).parameters  # type: ignore[attr-defined]
            closure = parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                name = self.describe(optimizer)
                raise ConfigError(
                    f"run.step at {user_line()}: {name} evaluates the loss several times in one "
                    f"step: call run.minimize({_bare(name)}, closure), with the pass over "
                    "run.microbatches in the closure"
                )

    @contextmanager
    def applying(self) -> Iterator[Callable[[Any, Callable[[], object]], None]]:
        """Yield a function ``apply(optimizer, step)`` that lets ``step`` make one update.

        ``optimizer`` is a tracked torch optimizer, or an object that steps tracked ones.
        """
        self._stepped = []
        try:
            yield self._apply
        finally:
            self._applied, self._stepped, self._inner = None, [], []

    def _apply(self, optimizer: Any, step: Callable[[], object]) -> None:
        before = len(self._stepped)
        self._applied, self._inner = optimizer, []
        step()
        self._applied = None
        for inner in self._inner:
            self._refuse_lost_state(optimizer, inner)
        is_known = isinstance(optimizer, Optimizer) or self._roster.has(optimizer)
        if not is_known and len(self._stepped) == before:
            raise ConfigError(
                f"run.step at {user_line()}: {self.describe(optimizer)} is no torch optimizer, is "
                "not tracked and stepped no tracked optimizer: name the torch optimizers in "
                "run.track and give them to run.step, with scaler=scaler if a GradScaler is used; "
                "or give the object state_dict and load_state_dict, and track it"
            )

    def _refuse_lost_state(self, outer: Any, inner: Optimizer) -> None:
        kept = {id(t) for state in outer.state.values() for t in _tensors(state)}
        if any(id(t) not in kept for state in inner.state.values() for t in _tensors(state)):
            raise ConfigError(
                f"run.step at {user_line()}: {self.describe(outer)} steps a "
                f"{type(inner).__name__} whose state is not a part of its own, so a restore loses "
                "it: name the inner optimizer in run.track as well"
            )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Judge a step of any torch optimizer; called by torch."""
        if self._applied is not None and not self._in_pass():
            self._judge_applied(optimizer)
        elif name := self._roster.name(optimizer):
            raise ConfigError(self._by_hand(name, has_closure=len(args) > 1 or bool(kwargs)))
        elif parameter := self._roster.parameter(optimizer):
            raise ConfigError(
                f"{user_line()}: an optimizer that is not tracked "
                f"({self.describe(optimizer)}) steps {parameter}, which is of a tracked module: "
                "name the optimizer in run.track and give it to run.step"
            )
        else:
            self._judge_own(optimizer)

    def _judge_applied(self, optimizer: Optimizer) -> None:
        """Judge a step that is a part of ``run.step``."""
        outer, name = self._applied, self._roster.name(optimizer)
        if any(each is optimizer for each in self._stepped):
            raise ConfigError(
                f"{name or self.describe(optimizer)} is stepped twice by run.step at "
                f"{user_line()}: step each optimizer once for a mean gradient"
            )
        if name or optimizer is outer:
            self._stepped.append(optimizer)
        elif isinstance(outer, Optimizer):
            self._inner.append(optimizer)
        elif parameter := self._roster.parameter(optimizer):
            raise ConfigError(
                f"run.step at {user_line()}: {self.describe(outer)} steps a "
                f"{type(optimizer).__name__} that is not tracked (over {parameter}): name it in "
                "run.track"
            )

    def _by_hand(self, name: str, *, has_closure: bool) -> str:
        line = user_line()
        if has_closure:
            return (
                f"{line}: the tracked optimizer {name} is stepped by hand with a closure: call "
                f"run.minimize({name}, closure), with the pass over run.microbatches in the closure"
            )
        return (
            f"{line}: the tracked optimizer {name} is stepped by hand, which no mean gradient is "
            f"made for: call run.step({name}) after the pass, with all optimizers of this update "
            f"in the one call, as run.step(a, b); with a GradScaler run.step({name}, "
            "scaler=scaler)"
        )

    def _judge_own(self, optimizer: Optimizer) -> None:
        """Judge a step of an optimizer that has nothing to do with the tracked modules."""
        step = self._place()
        if step is None:
            return
        if self._own.setdefault(optimizer, step) != step:
            raise ConfigError(
                f"{user_line()}: {self.describe(optimizer)} was stepped in step "
                f"{self._own[optimizer]} and again in step {step}, so it persists, and a restore "
                "would lose it: name it and the module whose parameters it steps in run.track; an "
                "optimizer for one step only (an inner loop) is made anew in each step"
            )

    def close(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def refuse_shards(name: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer that compares whole gradients, if this rank has parts of them."""
    from torch.distributed.tensor import DTensor

    sharded = next((p for p in parameters_of(optimizer) if isinstance(p, DTensor)), None)
    if sharded is not None:
        raise ConfigError(
            f"run.minimize({name}): a parameter of shape {tuple(sharded.shape)} is a DTensor, and "
            f"{type(optimizer).__name__} would compute with this rank's part as if it were the "
            "whole: leave the module unsharded, or use an optimizer without a closure"
        )


def _sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _bare(description: str) -> str:
    return description.partition(" ")[0] if not description.startswith("this ") else "optimizer"


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for each in state.values():
            yield from _tensors(each)
    elif isinstance(state, list | tuple):
        for each in state:
            yield from _tensors(each)
