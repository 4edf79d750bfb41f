"""A bug as a value: which function it is in, and what it makes of it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

_PACKAGES: Final = ("holdfast",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A bug that could be in production code.

    ``where`` is ``module:name`` or ``module:Class.name``; ``broken`` returns, from what is there,
    what is to be there instead. ``trial`` is the job that finds it, under ``seed`` for sure;
    ``after`` is how many seeds from 0 on were tried until then.
    """

    name: str
    about: str
    where: str
    broken: Callable[[Any], Any]
    trial: str
    seed: int

    @property
    def after(self) -> int:
        """How many schedules a search from seed 0 on takes."""
        return self.seed + 1


@contextlib.contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Have the bug in this process during the body, wherever the function was imported to.

    Raises ``AttributeError`` where there is no such function any more: the bug is to be planted
    anew in what took its place.
    """
    owner, name = _find(bug.where)
    real = inspect.getattr_static(owner, name)
    places = [owner, *_importers(owner, name, real)]
    broken = bug.broken(real)
    try:
        for place in places:
            setattr(place, name, broken)
        yield
    finally:
        for place in places:
            setattr(place, name, real)


def _find(where: str) -> tuple[Any, str]:
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    return owner, name


def _importers(owner: Any, name: str, real: Any) -> list[ModuleType]:
    """Return the other modules that imported a function by its name."""
    if not isinstance(owner, ModuleType):
        return []
    return [
        module
        for package, module in sorted(sys.modules.items())
        if package.partition(".")[0] in _PACKAGES and module is not owner
        if module.__dict__.get(name) is real
    ]
