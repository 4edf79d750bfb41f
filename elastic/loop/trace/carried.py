"""The script's own variables that a step reads before it writes them: what it carries over."""

from __future__ import annotations

import dis
import random
import re
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FrameType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from holdfast.elastic.loop.trace.digests import digest_of, shown
from holdfast.elastic.loop.user_code import is_users

_ACCESS: Final = re.compile(r"(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF)")
_MOST_ITEMS: Final = 1000
_MOST_ELEMENTS: Final = 1 << 20

_PLAIN: Final = (bool, int, float, complex, str, np.generic)
_STATES: Final = (nn.Module, Optimizer, torch.Generator, np.random.Generator, random.Random)


def carried(frame: FrameType, *, known: Collection[int], states: bool = True) -> dict[str, str]:
    """Return the variables that the loop at ``frame`` carries from step to step, as text.

    These are local variables that the loop's body reads first, and variables of the script's
    module. Plain values show themselves; of others there is a digest after ``#``. Objects whose id
    is in ``known`` (the tracked state, the run) are left out, and without ``states`` modules,
    optimizers and generators, whose digests take time.
    """
    found: dict[str, str] = {}
    names = _read_first(frame.f_code, frame.f_lasti) | set(frame.f_code.co_cellvars)
    inside = {name: value for name, value in frame.f_locals.items() if name in names}
    outside = {n: v for n, v in frame.f_globals.items() if not n.startswith("__")}
    for scope in (outside, inside):
        for name, value in scope.items():
            if id(value) not in known and (states or not isinstance(value, _STATES)):
                found.update(_texts(name, value, known=known))
    return found


def _read_first(code: CodeType, at: int) -> set[str]:
    """Return the names that are read before they are written, from ``at`` to the loop's end."""
    written, read = set[str](), set[str]()
    end = None
    for instruction in dis.get_instructions(code):
        if instruction.offset < at:
            continue
        if instruction.opname == "FOR_ITER" and end is None:
            end = instruction.argval
        if end is not None and instruction.offset >= end:
            break
        for kind, name in _accesses(instruction):
            if kind == "STORE":
                written.add(name)
            elif name not in written:
                read.add(name)
    return read


def _accesses(instruction: dis.Instruction) -> Iterator[tuple[str, str]]:
    names = instruction.argval
    kinds = _ACCESS.findall(instruction.opname)
    yield from zip(kinds, names if isinstance(names, tuple) else (names,), strict=False)


def _texts(name: str, value: Any, *, known: Collection[int]) -> Iterator[tuple[str, str]]:
    if (text := _text(value)) is not None:
        yield name, text
    elif _is_users_object(value):
        for key, item in list(vars(value).items()):
            if id(item) not in known and (text := _text(item)) is not None:
                yield f"{name}.{key}", text


def _text(value: Any) -> str | None:
    """Return a value as text; None for what is too large or of no interest."""
    if value is None or isinstance(value, _PLAIN):
        return shown(value) or f"#{digest_of(value)}"
    if isinstance(value, torch.Tensor):
        return f"#{digest_of(value)}" if value.numel() <= _MOST_ELEMENTS else None
    if isinstance(value, np.ndarray):
        return f"#{digest_of(value)}" if value.size <= _MOST_ELEMENTS else None
    if isinstance(value, list | tuple | dict | set):
        return _container(value)
    if isinstance(value, _STATES):
        return f"#{digest_of(_state_of(value))}"
    return None


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.getstate() if isinstance(value, random.Random) else value.state_dict()


def _container(value: Any) -> str | None:
    items = list(value.values()) if isinstance(value, Mapping) else list(value)
    if len(items) > _MOST_ITEMS or any(_text(item) is None for item in items):
        return None
    plain = all(isinstance(item, _PLAIN) or item is None for item in items)
    return (shown(value) if plain else "") or f"#{digest_of(value)}"


def _is_users_object(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, type | ModuleType | Dataset | DataLoader) or not hasattr(
        value, "__dict__"
    ):
        return False
    module = getattr(kind, "__module__", "")
    if module == "__main__":
        return True
    steps = getattr(kind, "__init__", None)
    code = getattr(steps, "__code__", None)
    return code is not None and is_users(code.co_filename)
