"""Rules for single arguments: the type, the range, and the remedy for any other value. Pure.

A rule takes a value and returns the remedy, or an empty text for a value that is right. A bool is
no number, and NaN is in no range.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeAlias

from holdfast.ckpt.errors import HoldfastError

Rule: TypeAlias = Callable[[object], str]

BEYOND: Final = 1 << 63
"""The least number that no count reaches: messages and arrays hold integers of 64 bits."""

LONGEST_S: Final = 1e9
"""The longest time limit, 31 years: torch adds it to a clock of 64 bits in nanoseconds."""

ROOTS: Final = "a directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
"""The places that a root of checkpoints may be, for messages."""

_SHOWN: Final = 200


def check(
    call: str,
    values: Mapping[str, object],
    rules: Mapping[str, Rule],
    *,
    error: type[HoldfastError],
) -> None:
    """Raise ``error`` for the first value that its rule refuses.

    The message names ``call``, the argument, the value and the remedy.
    """
    for name, rule in rules.items():
        if remedy := rule(values[name]):
            raise error(f"{call}({name}={shown(values[name])}): {remedy}")


def check_fields(group: object, rules: Mapping[str, Rule], *, error: type[HoldfastError]) -> None:
    """Raise ``error`` for the first field of a value that its rule refuses."""
    check(
        type(group).__name__,
        {name: getattr(group, name) for name in rules},
        rules,
        error=error,
    )


def shown(value: object) -> str:
    """Return the representation of a value, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def is_count(value: object, *, least: int) -> bool:
    """Return whether a value is an integer of 64 bits, ``least`` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < BEYOND


def count(least: int, *, remedy: str) -> Rule:
    """Return the rule for integers from ``least`` up."""

    def judged(value: object) -> str:
        if is_count(value, least=least):
            return ""
        is_large = isinstance(value, int) and value >= BEYOND
        return "give a number below 2**63" if is_large else remedy

    return judged


def number(least: float, most: float, *, remedy: str, above: bool = False) -> Rule:
    """Return the rule for integers and floats from ``least`` to ``most``.

    With ``above``, ``least`` itself is refused.
    """

    def judged(value: object) -> str:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return remedy
        return "" if least <= value <= most and not (above and value == least) else remedy

    return judged


def one_of(*names: str, remedy: str = "") -> Rule:
    """Return the rule for texts that are one of ``names``."""
    listed = ", ".join(map(repr, names[:-1]))
    words = remedy or f"give {listed} or {names[-1]!r}"
    return lambda value: "" if isinstance(value, str) and value in names else words


def text(*, remedy: str) -> Rule:
    """Return the rule for texts that are not empty."""
    return lambda value: "" if isinstance(value, str) and value else remedy


def texts(*, remedy: str) -> Rule:
    """Return the rule for a text, or a collection of texts."""

    def judged(value: object) -> str:
        is_several = isinstance(value, Collection) and all(isinstance(each, str) for each in value)
        return "" if is_several else remedy

    return judged


def flag(*, remedy: str = "give True or False") -> Rule:
    """Return the rule for a bool."""
    return lambda value: "" if isinstance(value, bool) else remedy


def size_or_none(*, remedy: str) -> Rule:
    """Return the rule for texts, integers and None. `holdfast.ckpt.sizes` reads them."""
    return lambda value: "" if value is None or _is_size(value) else remedy


def _is_size(value: object) -> bool:
    return isinstance(value, str) or is_count(value, least=1)


def instance(*kinds: type, remedy: str) -> Rule:
    """Return the rule for instances of ``kinds``."""
    return lambda value: "" if isinstance(value, kinds) else remedy


def optional(rule: Rule) -> Rule:
    """Return a rule that accepts None too."""
    return lambda value: "" if value is None else rule(value)


def true_or(rule: Rule) -> Rule:
    """Return a rule that accepts True too."""
    return lambda value: "" if value is True else rule(value)


def either(word: str, rule: Rule) -> Rule:
    """Return a rule that accepts the text ``word`` too."""
    return lambda value: "" if isinstance(value, str) and value == word else rule(value)
