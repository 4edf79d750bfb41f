"""A watch for learning-rate schedulers of tracked optimizers that nobody tracks."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

from holdfast.ckpt import torch_private
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.updates.interposed import Interposed
from holdfast.elastic.loop.updates.tracked_objects import TrackedObjects
from holdfast.elastic.loop.user_code import user_line

_MAKERS = (LRScheduler, ReduceLROnPlateau, SequentialLR, ChainedScheduler)
"""The classes whose ``__init__`` makes a scheduler; those of all others call the first one's."""


@dataclass(frozen=True, slots=True)
class _MadeScheduler:
    scheduler: weakref.ref[LRScheduler]
    line: str
    late: bool


class SchedulerWatch:
    """The schedulers that the training function makes, from its beginning on."""

    def __init__(self, interposed: Interposed) -> None:
        self._made: list[_MadeScheduler] = []
        self._judged = -1
        self._late = False
        for maker in _MAKERS:
            if "__init__" in vars(maker):
                interposed.before(maker, "__init__", self._on_init)

    def _on_init(self, scheduler: LRScheduler, *_: object, **__: object) -> None:
        if all(each.scheduler() is not scheduler for each in self._made[-4:]):
            self._made.append(_MadeScheduler(weakref.ref(scheduler), user_line(), self._late))

    def tracked(self) -> None:
        """Note that ``run.track`` was called."""
        self._late = True

    def refuse_untracked(self, roster: TrackedObjects) -> None:
        """Refuse a living scheduler of a tracked optimizer if it is not tracked."""
        if len(self._made) == self._judged:
            return
        self._refuse_older(roster)
        if self._untracked(roster) is not None:
            gc.collect()  # it may be garbage by now
        if (found := self._untracked(roster)) is not None:
            made, kind, name = found
            when = ", after run.track" if made.late else ""
            first = "make it before run.track and name it there" if made.late else "name it there"
            raise ConfigError(
                f"the {kind} made at {made.line}{when} sets the learning rate of the tracked "
                f"optimizer {name} and is not in run.track, so its count is lost in a restore: "
                f"{first}, as run.track({name}=..., scheduler=...)"
            )
        self._judged = len(self._made)

    def _refuse_older(self, roster: TrackedObjects) -> None:
        """Refuse schedulers that were made before the function was called, and are not tracked."""
        living = [made.scheduler() for made in self._made]
        if None in living:
            return  # those may have been of any optimizer
        known = {id(getattr(scheduler, "optimizer", None)) for scheduler in living}
        for name, optimizer in roster.optimizers:
            if id(optimizer) in known or not torch_private.has_scheduler(optimizer):
                continue
            if not any(
                getattr(each, "optimizer", None) is optimizer for each in roster.reached().values()
            ):
                raise ConfigError(
                    f"a learning-rate scheduler of the tracked optimizer {name} was made before "
                    "the decorated function was called, and is not in run.track, so its count is "
                    "lost in a restore: make both inside the function, and name both in run.track"
                )

    def _untracked(self, roster: TrackedObjects) -> tuple[_MadeScheduler, str, str] | None:
        reached: dict[int, object] | None = None
        for made in reversed(self._made):  # one of several schedulers is made after its parts
            scheduler = made.scheduler()
            name = roster.name(getattr(scheduler, "optimizer", None))
            if scheduler is None or not name:
                continue
            reached = roster.reached() if reached is None else reached
            if id(scheduler) not in reached:
                return made, type(scheduler).__name__, name
        return None
