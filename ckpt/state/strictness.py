"""Rules for which differences between a saved and a wanted state are accepted, by key. Pure.

A *level* says what may differ: ``exact`` nothing, ``ignore-missing`` wanted keys that were not
saved, ``ignore-extra`` saved keys that are not wanted, ``ignore`` both. The dtype and shape of a
key may never differ.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

from holdfast.ckpt import checks
from holdfast.ckpt.errors import ArgumentError, MismatchError

LEVELS: Final = ("exact", "ignore-missing", "ignore-extra", "ignore")

Strict: TypeAlias = str | bool | Mapping[str, str | bool]
"""A level for all keys, or glob patterns with levels; the first pattern that matches counts."""

Select: TypeAlias = str | Sequence[str] | None
"""Glob patterns of the keys to restore; None for all."""

SHOWN: Final = 6

_PATTERNS: Final = checks.optional(
    checks.texts(remedy="give a glob pattern, as in 'model.*', or several")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateVerdict:
    """The judged differences: ``refused`` sentences, ``missing`` and ``extra`` accepted keys."""

    refused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Strictness:
    """The level of every key: that of the first pattern that matches it, else ``exact``.

    Patterns are globs in which ``*`` also matches dots.
    """

    rules: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, strict: Strict) -> Strictness:
        """Return the rules for a caller's ``strict``.

        Raises ``ArgumentError`` for an unknown level.
        """
        rules = strict.items() if isinstance(strict, Mapping) else [("*", strict)]
        return cls(rules=tuple((pattern, _level(pattern, level)) for pattern, level in rules))

    def level(self, key: str) -> str:
        """Return the level of ``key``."""
        return next((level for glob, level in self.rules if fnmatchcase(key, glob)), "exact")

    def judge(self, *, missing: Mapping[str, str], extra: Mapping[str, str]) -> StateVerdict:
        """Divide the differing keys, each with its words, into refused and accepted ones."""
        good = {"missing": ("ignore-missing", "ignore"), "extra": ("ignore-extra", "ignore")}
        refused, accepted = [], {}
        for kind, found in (("missing", missing), ("extra", extra)):
            accepted[kind] = tuple(k for k in found if self.level(k) in good[kind])
            refused += [words for k, words in found.items() if self.level(k) not in good[kind]]
        return StateVerdict(refused=tuple(refused), **accepted)


def _level(pattern: str, level: str | bool) -> str:
    if not isinstance(pattern, str):
        raise ArgumentError(f"strict has the key {pattern!r}; give glob patterns, as in 'model.*'")
    name = {True: "exact", False: "ignore"}[level] if isinstance(level, bool) else level
    if name not in LEVELS:
        where = "strict" if pattern == "*" else f"strict[{pattern!r}]"
        near = difflib.get_close_matches(str(name), LEVELS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ArgumentError(f"{where} is {level!r}; it must be one of {', '.join(LEVELS)}{hint}")
    return name


def chooser(select: Select) -> Callable[[str], bool]:
    """Return a test for selected keys; the pattern ``a.*`` also selects the key ``a``.

    Raises ``ArgumentError`` for patterns that are no texts.
    """
    if select is None:
        return lambda _: True
    check_patterns(select)
    globs = [select] if isinstance(select, str) else list(select)
    return lambda key: any(fnmatchcase(key, glob) or fnmatchcase(f"{key}.", glob) for glob in globs)


def check_patterns(select: Select) -> None:
    """Raise ``ArgumentError`` unless ``select`` is a text, several texts or None."""
    if remedy := _PATTERNS(select):
        raise ArgumentError(f"select is {checks.shown(select)}; {remedy}")


def check_selected(select: Select, keys: Collection[str]) -> None:
    """Raise ``MismatchError`` naming near keys where a pattern matches none of ``keys``."""
    for glob in [select] if isinstance(select, str) else select or ():
        chosen = chooser(glob)
        if any(map(chosen, keys)):
            continue
        near = _near(glob, keys)
        raise MismatchError(
            f"select: {glob!r} matches none of the {len(keys)} keys of this state; "
            + (f"near: {', '.join(near)}" if near else "the state is empty")
        )


def _near(glob: str, keys: Iterable[str]) -> list[str]:
    """Return a few keys, or prefixes of keys, that look like ``glob``."""
    stems = dict.fromkeys(
        ".".join(parts[:n])
        for parts in (key.split(".") for key in sorted(keys))
        for n in range(1, len(parts) + 1)
    )
    plain = glob.rstrip("*").rstrip(".")
    found = difflib.get_close_matches(plain, stems, n=SHOWN, cutoff=0.5)
    return found or [stem for stem in stems if "." not in stem][:SHOWN]


def mismatch(problems: Sequence[str], *, origin: str) -> MismatchError:
    """Return the error that lists the first few problems."""
    shown = "; ".join(problems[:SHOWN])
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return MismatchError(
        f"{origin} does not fit this state ({len(problems)} differences): {shown}{more}. Build "
        "the model and optimizer that were saved, choose another checkpoint, or say with strict= "
        f"({', '.join(LEVELS)}; per key by a mapping of patterns) which missing and extra keys "
        "are meant; other shapes and dtypes are never accepted"
    )
