"""Values of Python's standard types as parts that JSON can hold, and back.

A type is here if its values are data: nothing of it has to be imported or run to make one again.
Each is written as ``{"$python": [name, parts]}``, the parts encoded like any plain value.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from io import BytesIO
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final, NamedTuple
from uuid import UUID

TAG: Final = "$python"

FACTORIES: Final[Mapping[str, Callable[[], Any] | None]] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, dict, set)},
    **{kind.__name__: kind for kind in (tuple, frozenset, Counter, OrderedDict, deque)},
}
"""The default factories of a ``defaultdict`` that are data, by name."""


class _Kind(NamedTuple):
    """A type: ``apart`` gives the parts of a value, ``make`` the value that has these parts.

    ``apart`` raises ``ValueError`` in words for a value of the type that is more than data.
    """

    type: type
    apart: Callable[[Any], object]
    make: Callable[[Any], object]


def _ordered(value: OrderedDict[Any, Any]) -> object:
    return [list(map(list, value.items())), vars(value)]


def _make_ordered(parts: Any) -> object:
    items, attributes = parts
    found = OrderedDict(items)
    vars(found).update(attributes)
    return found


def _defaults(value: defaultdict[Any, Any]) -> object:
    for name, factory in FACTORIES.items():
        if value.default_factory is factory:
            return [name, dict(value)]
    raise ValueError("its default_factory is code; give dict(...) of it")


def _make_defaults(parts: Any) -> object:
    name, items = parts
    return defaultdict(FACTORIES[name], items)


def _moment(value: datetime | time) -> object:
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise ValueError(
            "its time zone is an object; give it in UTC: value.astimezone(timezone.utc)"
        )
    return [value.isoformat(), value.fold]


def _make_counter(parts: Any) -> object:
    found: Counter[Any] = Counter()
    for key, count in parts.items():
        found[key] = count
    return found


def _make_stream(parts: Any) -> object:
    content, position = parts
    found = BytesIO(content)
    found.seek(position)
    return found


def _bounds(value: Any) -> object:
    return [value.start, value.stop, value.step]


KINDS: Final[Mapping[str, _Kind]] = {
    kind.type.__name__: kind
    for kind in (
        _Kind(OrderedDict, _ordered, _make_ordered),
        _Kind(Counter, dict, _make_counter),
        _Kind(defaultdict, _defaults, _make_defaults),
        _Kind(deque, lambda v: [list(v), v.maxlen], lambda p: deque(p[0], p[1])),
        _Kind(set, list, set),
        _Kind(frozenset, list, frozenset),
        _Kind(range, _bounds, lambda p: range(*p)),
        _Kind(slice, _bounds, lambda p: slice(*p)),
        _Kind(bytearray, bytes, bytearray),
        _Kind(BytesIO, lambda v: [v.getvalue(), v.tell()], _make_stream),
        _Kind(complex, lambda v: [v.real, v.imag], lambda p: complex(*p)),
        _Kind(Decimal, str, Decimal),
        _Kind(Fraction, lambda v: [v.numerator, v.denominator], lambda p: Fraction(*p)),
        _Kind(datetime, _moment, lambda p: datetime.fromisoformat(p[0]).replace(fold=p[1])),
        _Kind(date, date.isoformat, date.fromisoformat),
        _Kind(time, _moment, lambda p: time.fromisoformat(p[0]).replace(fold=p[1])),
        _Kind(timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda p: timedelta(*p)),
        _Kind(UUID, str, UUID),
        _Kind(PurePosixPath, str, PurePosixPath),
        _Kind(PureWindowsPath, str, PureWindowsPath),
        _Kind(Path, str, Path),
    )
}

_NAMES: Final[Mapping[type, str]] = {kind.type: name for name, kind in KINDS.items()} | {
    type(Path()): "Path"
}

UNORDERED: Final = frozenset({"set", "frozenset"})
"""Types whose parts may come in any order."""

_FAULTS: Final = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def name_of(value: object) -> str | None:
    """Return the name of the exact type of ``value``, None if it is not one of `KINDS`."""
    return _NAMES.get(type(value))


def parts_of(name: str, value: object) -> Any:
    """Return the parts of a value of the type ``name``.

    Raises ``ValueError`` in words for one that is more than data.
    """
    return KINDS[name].apart(value)


def make(name: str, parts: object) -> Any:
    """Return the value of the type ``name`` with these parts.

    Raises ``ValueError`` if there is no such type, or if these are not parts of one.
    """
    if name not in KINDS:
        raise ValueError(f"no type {name!r} is known")
    try:
        return KINDS[name].make(parts)
    except _FAULTS as error:
        raise ValueError(f"no parts of a {name}: {error}") from error
