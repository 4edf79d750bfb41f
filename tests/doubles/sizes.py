"""The memory of objects with all that they hold."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import msgspec

_LEFT_OUT = (type, ModuleType, Callable)
"""Classes, modules and functions: they belong to the program, not to its state."""


def deep_bytes(roots: Iterable[object], *, beyond: Collection[object] = ()) -> int:
    """Return the bytes of ``roots`` and of all that they hold, each object once.

    The objects ``beyond``, and what only they hold, are left out.
    """
    seen = {id(each) for each in beyond}
    waiting, nbytes = [*roots], 0
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _LEFT_OUT):
            continue
        seen.add(id(each))
        nbytes += sys.getsizeof(each)
        waiting.extend(_held(each))
    return nbytes


def _held(each: Any) -> Iterator[object]:
    if isinstance(each, Mapping):
        for key, value in each.items():
            yield key
            yield value
    elif isinstance(each, list | tuple | set | frozenset | deque):
        yield from each
    if isinstance(each, msgspec.Struct):
        yield from (getattr(each, name) for name in each.__struct_fields__)
    else:
        for kind in type(each).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                private = name.startswith("__") and not name.endswith("__")
                full = f"_{kind.__name__.lstrip('_')}{name}" if private else name
                if name not in ("__dict__", "__weakref__") and hasattr(each, full):
                    yield getattr(each, full)
    yield getattr(each, "__dict__", None)
