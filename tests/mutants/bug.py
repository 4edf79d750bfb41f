"""A bug as a value: the function it is in, and the broken replacement."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

_PACKAGES: Final = ("holdfast", "mutants")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A bug that could be in production code.

    ``where`` is ``module:name`` or ``module:Class.name``; ``broken`` maps the real function to its
    replacement. ``trial`` is the job that finds the bug, for sure under ``seed``; ``after`` is the
    number of seeds, counted from 0, that a search tries until then.
    """

    name: str
    about: str
    where: str
    broken: Callable[[Any], Any]
    trial: str
    seed: int

    @property
    def after(self) -> int:
        """The number of schedules that a search from seed 0 on takes."""
        return self.seed + 1


@contextlib.contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Plant the bug in this process during the body, in every module that imported the function.

    Raises ``AttributeError`` if the function no longer exists: the bug must then be planted in its
    successor.
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
