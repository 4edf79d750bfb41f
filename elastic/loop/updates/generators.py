"""The random generators that a user's function can reach: by its variables, functions and objects.

The search reads variables and attributes, and calls no code of the user's. It is bounded: what lies
deeper, or beyond the bound, is not found.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from holdfast.elastic.loop.user_code import is_users, line_of
from holdfast.elastic.tracked.generators import GENERATORS

_NOWHERE: Final = "<none>"
_SEQUENCES: Final[tuple[Any, ...]] = (list, tuple, set, frozenset, deque)
_MOST_VALUES: Final = 10_000
_MOST_ITEMS: Final = 64
_MOST_FRAMES: Final = 8
_DEPTH: Final = 3
"""Steps from a variable to a generator: through containers, objects, closures and modules."""

_CLOSED: Final = (DataLoader, Sampler, Optimizer)
"""Kinds of objects that are not looked into."""

_PLAIN: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.Tensor, nn.Parameter, np.ndarray}
)

_OWN: Final = frozenset(vars(nn.Module()))
"""Attributes that every module has, and that hold no generator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGenerator:
    """A generator, the expression by which the user's ``code`` reaches it, and the loop's line."""

    generator: Any
    name: str
    code: CodeType
    line: str
    after: int = 0
    scope: dict[str, Any]

    @property
    def at(self) -> str:
        """The first line that uses the variable: after that of the loop, or in a function."""
        root = self.name.partition(".")[0].partition("[")[0]
        codes = [(self.code, self.after)]
        codes += [(each.__code__, 0) for _, each in _copied(self.scope) if _is_users_def(each)]
        lines = (line for code, after in codes for line in _lines_of(code, root, after=after))
        return next(lines, self.line)


@dataclass(frozen=True, slots=True)
class _Place:
    """A value on the way of the search, and the code whose variable leads to it."""

    value: Any
    name: str
    depth: int
    frame: FrameType | None = None
    code: CodeType | None = None


def reached_from(frame: FrameType | None) -> list[FoundGenerator]:
    """Return the generators that are reached from a frame and the user's frames around it."""
    found: list[FoundGenerator] = []
    first = (place for each in _users_frames(frame) for place in _variables_of(each))
    for place in _spread(first, _inside):
        if issubclass(type(place.value), GENERATORS):
            found.append(_found(place))
    return found


def held_by(values: Iterable[object]) -> set[int]:
    """Return the ids of the generators that are reached from tracked values, modules left out."""

    def inside(place: _Place) -> Iterator[_Place]:
        if not issubclass(type(place.value), nn.Module):
            for _, each in _items(place.value, any_class=True):
                yield _Place(each, "", place.depth + 1)

    found = _spread((_Place(value, "", 0) for value in values), inside)
    return {id(each.value) for each in found if issubclass(type(each.value), GENERATORS)}


def _spread(
    first: Iterable[_Place], inside: Callable[[_Place], Iterator[_Place]]
) -> Iterator[_Place]:
    """Yield places that may hold generators, nearer ones first, each object once."""
    looked, seen = 0, set[int]()
    queue = deque[_Place]()
    kept: list[object] = []  # while it is here, no other object gets its id
    source: Iterable[_Place] = first
    while True:
        for place in source:
            looked += 1
            if type(place.value) not in _PLAIN and id(place.value) not in seen:
                seen.add(id(place.value))
                kept.append(place.value)
                queue.append(place)
            if looked >= _MOST_VALUES:
                break
        if not queue:
            return
        place = queue.popleft()
        yield place
        source = inside(place) if place.depth < _DEPTH and looked < _MOST_VALUES else ()


def _users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    count = 0
    while frame is not None and count < _MOST_FRAMES:
        if is_users(frame.f_code.co_filename):
            count += 1
            yield frame
        frame = frame.f_back


def _found(place: _Place) -> FoundGenerator:
    assert place.frame is not None and place.code is not None
    own = place.code is place.frame.f_code
    return FoundGenerator(
        generator=place.value,
        name=place.name,
        code=place.code,
        line=line_of(place.frame),
        after=place.frame.f_lineno if own else 0,
        scope=place.frame.f_globals,
    )


def _is_users_def(value: object) -> bool:
    return type(value) is FunctionType and is_users(value.__code__.co_filename)


def _lines_of(code: CodeType, name: str, *, after: int = 0) -> Iterator[str]:
    """Yield the lines of a function, and of those within it, that read a variable."""
    for used in dis.get_instructions(code):
        place = (used.positions and used.positions.lineno) or 0
        if used.argval == name and used.opname.startswith("LOAD_") and place > after:
            yield f"{Path(code.co_filename).name}:{place}"
    for each in code.co_consts:
        if type(each) is CodeType:
            yield from _lines_of(each, name, after=after)


def _variables_of(frame: FrameType) -> Iterator[_Place]:
    code = frame.f_code
    for name, value in _locals_of(frame):
        yield _Place(value, name, 0, frame, code)
    for name, value in _copied(frame.f_globals):
        yield _Place(value, str(name), 0, frame, code)


def _locals_of(frame: FrameType) -> list[tuple[str, Any]]:
    """Return the local variables; the frame keeps none of them alive for it."""
    variables = frame.f_locals
    if variables is frame.f_globals:
        return []
    copied = list(variables.items())
    if type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()  # a copy of the variables that the frame would keep until it ends
    return copied


def _inside(place: _Place) -> Iterator[_Place]:
    value = place.value
    if type(value) is FunctionType:
        yield from _of_function(value, place)
        return
    is_module = issubclass(type(value), nn.Module)
    for suffix, each in _items(value):
        deeper = bool(suffix) and not (is_module and issubclass(type(each), nn.Module))
        depth = place.depth + deeper  # a model is looked into as a whole
        yield _Place(each, f"{place.name}{suffix}", depth, place.frame, place.code)


def _of_function(function: FunctionType, place: _Place) -> Iterator[_Place]:
    """Yield the closure, the defaults and the global variables of a function of the user's."""
    code = function.__code__
    if not is_users(code.co_filename):
        return
    names = [*zip(code.co_freevars, _cells(function), strict=False)]
    names += [("a default", each) for each in function.__defaults__ or ()]
    names += [*(function.__kwdefaults__ or {}).items()]
    known = function.__globals__
    names += [(name, known[name]) for name in _names_in(code) if name in known]
    for name, value in names:
        yield _Place(value, name, place.depth + 1, place.frame, code)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names in a function and in the functions and comprehensions within it."""
    yield from code.co_names
    for each in code.co_consts:
        if type(each) is CodeType:
            yield from _names_in(each)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None


def _items(value: Any, *, any_class: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with the suffix by which it is reached.

    Without ``any_class`` only containers, functions' parts, modules and objects of the user's own
    classes are looked into.
    """
    kind = type(value)
    if issubclass(kind, dict):
        entries = _first(dict.items(value))
        yield from ((f"[{_key(key)}]", each) for key, each in entries)
    elif base := next((each for each in _SEQUENCES if issubclass(kind, each)), None):
        for index, each in enumerate(_first(base.__iter__(value))):
            yield f"[{index}]", each
    elif kind is MethodType:
        yield "", value.__self__
        yield "", value.__func__
    elif kind is functools.partial:
        yield from (("", each) for each in (value.func, value.args, value.keywords))
    elif kind is ModuleType:
        if is_users(str(vars(value).get("__file__") or _NOWHERE)):
            yield from ((f".{name}", each) for name, each in _copied(vars(value)))
    elif not issubclass(kind, _CLOSED) and (any_class or _is_open(value)):
        yield from _attributes(value)


def _key(key: object) -> str:
    return repr(key) if type(key) in (str, int) else "..."


def _copied(values: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the entries of a dict, which another thread may change meanwhile."""
    with contextlib.suppress(RuntimeError):
        return list(dict.items(values))
    return []


def _first(values: Iterable[Any]) -> list[Any]:
    """Return the first entries of a container, which another thread may change meanwhile."""
    with contextlib.suppress(RuntimeError):
        return list(itertools.islice(values, _MOST_ITEMS))
    return []


def _is_open(value: Any) -> bool:
    """Return whether an object is a module of torch's, or of a class of the user's, or that."""
    kind = value if issubclass(type(value), type) else type(value)
    return issubclass(kind, nn.Module) or any(_is_users_class(each) for each in kind.__mro__)


@functools.cache
def _file_of(module: str) -> str:
    found = sys.modules.get(module)
    return str(vars(found).get("__file__") or _NOWHERE) if found is not None else _NOWHERE


def _is_users_class(kind: type) -> bool:
    module = kind.__dict__.get("__module__")
    return type(module) is str and is_users(_file_of(module))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object and of its classes, without a call of its own code."""
    is_class = issubclass(type(value), type)
    if not is_class:
        with contextlib.suppress(AttributeError, TypeError):
            yield from _own(object.__getattribute__(value, "__dict__"))
    for kind in (value if is_class else type(value)).__mro__:
        of_user = _is_users_class(kind)
        for name, each in _copied(dict(kind.__dict__)):
            if type(each) is not MemberDescriptorType:
                if of_user:
                    yield f".{name}", each
            elif not is_class:
                with contextlib.suppress(AttributeError):
                    yield f".{name}", each.__get__(value)


def _own(attributes: Any) -> Iterator[tuple[str, Any]]:
    if type(attributes) is not dict:
        return
    for name, each in _copied(attributes):
        if name == "_modules" and issubclass(type(each), dict):
            yield from ((f".{child}", module) for child, module in _copied(each))
        elif name not in _OWN:
            yield f".{name}", each
