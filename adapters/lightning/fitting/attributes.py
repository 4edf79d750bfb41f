"""Attributes of modules and callbacks that hooks change: kept as differences from the first ones.

Plain values, tensors, arrays, enums, and containers of these are kept, and objects with
``state_dict`` and ``load_state_dict``. A generation builds its objects as the first one did, so the
differences are enough. No part of Lightning is imported here.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from holdfast.ckpt.state.plain import is_plain
from holdfast.elastic import ConfigError

_ENUM: Final = "$enum"
_GONE: Final = "$gone"
_STATE: Final = "$state"


class _Other:
    """A value that cannot be kept; equal to itself alone."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Other) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Owner:
    """An object with attributes. ``ignored`` are names, ``tracked`` objects kept elsewhere."""

    name: str
    value: Any
    ignored: frozenset[str] = frozenset()


class KeptAttributes:
    """The attributes of ``owners`` that differ from those of the beginning.

    ``tracked`` are the ids of objects that the run keeps by itself, such as the layers of a module.
    """

    def __init__(self, owners: list[Owner], *, tracked: frozenset[int] = frozenset()) -> None:
        self._owners, self._tracked = owners, tracked
        self._first = {owner.name: self._values(owner) for owner in owners}

    def collect(self) -> dict[str, dict[str, Any]]:
        """Return the differences, by the owner's name and the attribute's.

        Raises ``ConfigError`` for an attribute that cannot be kept and is another object now.
        """
        found: dict[str, dict[str, Any]] = {}
        for owner in self._owners:
            first, now = self._first[owner.name], self._values(owner)
            changed = {n: v for n, v in now.items() if n not in first or not same(v, first[n])}
            for name, value in changed.items():
                was = first.get(name)
                if isinstance(value, _Other) or _is_state(value) != _is_state(was):
                    raise ConfigError(
                        f"fit: a hook set {owner.name}.{name} to a "
                        f"{type(getattr(owner.value, name)).__name__}, which a restore cannot "
                        "make: make it in __init__ or on_fit_start and give it state_dict() and "
                        "load_state_dict(), or keep numbers and tensors"
                    )
            changed |= {name: {_GONE: True} for name in first if name not in now}
            if changed:
                found[owner.name] = changed
        return found

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Give attributes that are as in the beginning the values of `collect`."""
        for owner in self._owners:
            for name, value in saved.get(owner.name, {}).items():
                _set(owner.value, name, value)

    def _values(self, owner: Owner) -> dict[str, Any]:
        return {
            name: _copied(value)
            for name, value in vars(owner.value).items()
            if name not in owner.ignored
            and not callable_only(value)
            and id(value) not in self._tracked
        }


def first_difference(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return the name of the first attribute that differs between two collections, or ""."""
    for owner in sorted({*before, *after}):
        one, other = before.get(owner, {}), after.get(owner, {})
        for name in sorted({*one, *other}):
            if name not in one or name not in other or not same(one[name], other[name]):
                return f"{owner}.{name}"
    return ""


def callable_only(value: object) -> bool:
    """True for functions and methods, which no step changes."""
    return callable(value) and not hasattr(value, "state_dict")


def same(one: Any, other: Any) -> bool:
    """Say whether two kept values are equal; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def _is_state(value: object) -> bool:
    return isinstance(value, dict) and list(value) == [_STATE]


def _copied(value: Any) -> Any:
    """Return a copy of a value to save; `_Other` if it cannot be saved."""
    if type(value) is torch.Tensor:
        return value.detach().clone()
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if isinstance(value, Enum):
        return {_ENUM: value.name}
    if isinstance(value, dict):
        parts = {key: _copied(item) for key, item in value.items()}
        kept: Any = parts if _fits(parts.values()) else _Other(value)
        return kept
    if type(value) in (list, tuple, deque):
        items = [_copied(item) for item in value]
        return type(value)(items) if _fits(items) else _Other(value)
    if is_plain(value):
        return copy.deepcopy(value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        state = _copied(dict(value.state_dict()))
        return _Other(value) if isinstance(state, _Other) else {_STATE: state}
    return _Other(value)


def _fits(values: Any) -> bool:
    return not any(isinstance(each, _Other) or _is_state(each) for each in values)


def _set(owner: Any, name: str, value: Any) -> None:
    now: Any = getattr(owner, name, None)
    tag = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else ""
    if tag == _GONE:
        delattr(owner, name)
    elif tag == _ENUM:
        setattr(owner, name, type(now)[value[_ENUM]])
    elif tag == _STATE:
        now.load_state_dict(copy.deepcopy(value[_STATE]))
    elif isinstance(now, dict) and isinstance(value, dict):
        now.clear()
        now.update(copy.deepcopy(value))
    else:
        setattr(owner, name, copy.deepcopy(value))


def detached(value: Any) -> Any:
    """Return a copy of plain values and tensors, in dicts too."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    return copy.deepcopy(value)


def modules_of(module: nn.Module) -> frozenset[int]:
    """Return the ids of a module and of its parts, which the run keeps as a model."""
    return frozenset(map(id, module.modules()))
