"""Notes where a script uses what is not the run's: loaders, generators, clocks, ranks, the world.

The patches stay for the life of the process. They note lines and change no result.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from holdfast.elastic.loop.trace.records import Use
from holdfast.elastic.loop.user_code import is_users, line_of, user_frame, user_line

Note = Callable[[Use, str, str], None]
"""Called with the kind of use, the line and a detail."""

_CLOCKS: Final = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic")
_RANDOM: Final = (
    "random", "getrandbits", "shuffle", "choice", "choices", "sample", "randint", "randrange",
    "uniform", "gauss", "normalvariate",
)  # fmt: skip
_THROUGH: Final = ("/random.py", "/os.py", "<frozen os>", "/_collections_abc.py")
_LOADING: Final = str(Path("torch", "utils", "data"))  # a loader is noted as such
_THROUGH_ABC: Final = "<frozen _collections_abc>"

_listeners: list[Note] = []
_steppers: list[Callable[[Optimizer, str], None]] = []
_schedulers: list[Callable[[LRScheduler], None]] = []
_zeroers: list[Callable[[Any, str], None]] = []
_made: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def listen(
    note: Note,
    *,
    stepped: Callable[[Optimizer, str], None],
    scheduled: Callable[[LRScheduler], None],
    zeroed: Callable[[Any, str], None],
) -> None:
    """Tell ``note`` of every use from now on, and no other; patch at the first call.

    ``stepped`` is called after each step of an optimizer, with the line of the script that stepped
    it by hand; ``scheduled`` after a scheduler's; ``zeroed`` with the optimizer or module whose
    gradients the script drops, and the line.
    """
    if not _listeners:
        _patch()
    _listeners[:], _steppers[:] = [note], [stepped]
    _schedulers[:], _zeroers[:] = [scheduled], [zeroed]


class ForeignGenerators(TorchFunctionMode):
    """Notes the functions of torch that draw from a generator that is not the default one.

    The run's own generators, by id, are in ``ours``.
    """

    def __init__(self, ours: set[int]) -> None:
        super().__init__()
        self._ours = ours

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and note its generator."""
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        foreign = generator is not None and generator is not torch.default_generator
        caller = sys._getframe(1).f_code.co_filename
        if foreign and id(generator) not in self._ours and _LOADING not in caller:
            _note("generator", user_line(), getattr(func, "__name__", ""))
        return func(*args, **kwargs)


def _note(use: Use, line: str, detail: str = "") -> None:
    for note in _listeners:
        note(use, line, detail)


def _caller(through: tuple[str, ...] = ()) -> FrameType | None:
    """Return the frame of the user's code that called a patched function itself, else None."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(through or ("\0",)):
        frame = frame.f_back
    return frame if frame is not None and is_users(frame.f_code.co_filename) else None


def _by_hand() -> FrameType | None:
    """Return the user's frame that called into torch, None if Holdfast did."""
    frame: FrameType | None = sys._getframe(2)
    torchs = str(Path(torch.__file__).parent)
    while frame is not None and frame.f_code.co_filename.startswith((torchs, __file__, "<")):
        frame = frame.f_back
    return frame if frame is not None and is_users(frame.f_code.co_filename) else None


def _patch() -> None:
    _patch_loaders()
    _patch_randomness()
    _patch_surroundings()
    _patch_optimizers()


def _wrap(holder: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Replace a function by ``around`` of it."""
    before = getattr(holder, name)
    setattr(holder, name, functools.wraps(before)(around(before)))


def _patch_loaders() -> None:
    kinds: list[type] = [DataLoader]
    if (stateful := sys.modules.get("torchdata.stateful_dataloader")) is not None:
        kinds.append(stateful.StatefulDataLoader)

    def making(before: Any) -> Any:
        def made(self: Any, *args: Any, **options: Any) -> None:
            before(self, *args, **options)
            _made[self] = user_line()

        return made

    def iterating(before: Any) -> Any:
        def iterated(self: Any) -> Any:
            if _caller() is not None:
                _note("loader", user_line(), _made.get(self, ""))
            return before(self)

        return iterated

    for kind in kinds:
        _wrap(kind, "__init__", making)
        _wrap(kind, "__iter__", iterating)


def _patch_randomness() -> None:
    def drawing(before: Any) -> Any:
        def drawn(self: Any, *args: Any, **options: Any) -> Any:
            if (frame := _caller(_THROUGH)) is not None:
                _note("python generator", line_of(frame), before.__name__)
            return before(self, *args, **options)

        return drawn

    def making(before: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            if (frame := _caller()) is not None:
                _note("numpy generator", line_of(frame), "" if args or options else "unseeded")
            return before(*args, **options)

        return made

    for name in _RANDOM:
        _wrap(random.Random, name, drawing)
    _wrap(np.random, "default_rng", making)


def _patch_surroundings() -> None:
    def reading(use: Use, through: tuple[str, ...] = ()) -> Callable[[Any], Any]:
        def around(before: Any) -> Any:
            def read(*args: Any, **options: Any) -> Any:
                if (frame := _caller(through)) is not None:
                    _note(use, line_of(frame), before.__name__)
                return before(*args, **options)

            return read

        return around

    for name in _CLOCKS:
        _wrap(time, name, reading("clock"))
    for name in ("get_rank", "get_world_size"):
        _wrap(dist, name, reading("rank"))
    _wrap(type(os.environ), "__getitem__", reading("environment", (*_THROUGH, _THROUGH_ABC)))


def _patch_optimizers() -> None:
    def zeroing(before: Any) -> Any:
        def zeroed(self: Any, *args: Any, **options: Any) -> Any:
            if _caller() is not None:
                for tell in _zeroers:
                    tell(self, user_line())
            return before(self, *args, **options)

        return zeroed

    def scheduling(before: Any) -> Any:
        def scheduled(self: Any, *args: Any, **options: Any) -> Any:
            result = before(self, *args, **options)
            if user_frame() is not None:
                for tell in _schedulers:
                    tell(self)
            return result

        return scheduled

    def stepped(optimizer: Optimizer, args: Any, options: Any) -> None:
        line = line_of(frame) if (frame := _by_hand()) is not None else ""
        for tell in _steppers:
            tell(optimizer, line)

    _wrap(Optimizer, "zero_grad", zeroing)
    _wrap(nn.Module, "zero_grad", zeroing)
    _wrap(LRScheduler, "step", scheduling)
    register_optimizer_step_post_hook(stepped)
