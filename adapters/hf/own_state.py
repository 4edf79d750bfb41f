"""The attributes of a Trainer that a script's own subclass may change while it evaluates a batch.

Each rank evaluates some of the batches, so such an attribute would count those of its rank alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from holdfast.adapters.hf.accepted import own_classes
from holdfast.ckpt.torch_private import version_of
from holdfast.elastic import ConfigError

_DEPTH: Final = 3
_LENGTH: Final = 1000
"""Items of a container that are looked at; of a longer one, its length is."""

_OF_LIBRARIES: Final = frozenset({"_metrics", "control", "callback_handler", "state"})
_PLAIN: Final = (bool, int, float, str, bytes, type(None))


class OwnState:
    """The attributes of ``trainer``, which batches of an evaluation leave as they are.

    Trainers of the libraries are not looked at: their metrics are exchanged.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._kinds = own_classes(type(trainer))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise ``ConfigError`` at the end of the body if it changed an attribute."""
        before = self._look()
        yield
        after = self._look()
        for name in sorted(before.keys() | after.keys()):
            if not _same(before.get(name), after.get(name)):
                raise ConfigError(
                    f"resilient_trainer: {self._kinds[0].__name__} changes self.{name} while it "
                    "evaluates a batch, and each rank evaluates some of the batches only: give "
                    "HoldfastArguments(divide_evaluation=False), so that every rank evaluates all"
                )

    def _look(self) -> dict[str, Any]:
        if not self._kinds:
            return {}
        found = vars(self._trainer).items()
        return {name: _seen(value, _DEPTH) for name, value in found if name not in _OF_LIBRARIES}


def _seen(value: Any, depth: int) -> Any:
    """Return what can be compared with a later look: values themselves, and what containers hold.

    Nothing is copied but the containers, and arrays that are small.
    """
    if isinstance(value, torch.Tensor):
        return (value, None if value.is_inference() else version_of(value))
    if isinstance(value, np.ndarray):
        return (value, value.tobytes() if value.size <= _LENGTH else None)
    if isinstance(value, dict | list | tuple | set | deque) and depth:
        if len(value) > _LENGTH:
            return len(value)
        if isinstance(value, dict):
            return {key: _seen(item, depth - 1) for key, item in value.items()}
        return [_seen(item, depth - 1) for item in value]
    return value


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, _PLAIN) and one == other
