"""Pattern files: TOML text to patterns. Pure.

docs/how-to/patterns.md describes the keys.
"""

from __future__ import annotations

import tomllib
from typing import Final, Literal, TypeAlias

import msgspec

from holdfast.ckpt.convert.patterns.language import (
    Amount,
    PatternFile,
    PatternStep,
    RefusedNames,
    Trim,
    make_pattern,
)
from holdfast.ckpt.errors import ArgumentError
from holdfast.ckpt.types import learn

FORMAT: Final = 1

_Widths: TypeAlias = dict[str, Amount] | list[Amount]


class _StepText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of ``join`` or ``split``."""

    over: str
    as_: str = msgspec.field(name="as")
    axis: int = 0
    widths: _Widths = []
    groups: Amount = 1
    sub: list[Amount] = []
    copies: list[Amount] = []
    values: list[str] = []


class _TrimText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table ``trim``."""

    to: Amount
    axis: int = 0
    multiple: Amount = 1
    padding: str = "zero"


class _PatternText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table ``pattern``."""

    pieces: str
    whole: str
    name: str = ""
    join: list[_StepText] = []
    split: list[_StepText] = []
    trim: _TrimText | None = None
    where: dict[str, str] = {}
    otherwise: bool = False


class _RefuseText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table ``refuse``."""

    names: str
    remedy: str


class _FileText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pattern file as written."""

    format: Literal[1]
    pattern: list[_PatternText]
    sizes: dict[str, int] = {}
    drop: list[str] = []
    refuse: list[_RefuseText] = []


def parse(text: str, *, origin: str) -> PatternFile:
    """Return the patterns of a file's text.

    Raises ``ArgumentError`` naming ``origin``, the pattern and the key at fault.
    """
    try:
        found = msgspec.convert(tomllib.loads(text), _FileText)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"{origin}: no TOML: {error}; correct that line") from error
    except msgspec.ValidationError as error:
        raise ArgumentError(
            f"{origin}: {error}; a pattern file has format = {FORMAT} and [[pattern]] tables, see "
            "docs/how-to/patterns.md"
        ) from error
    return PatternFile(
        origin=origin,
        patterns=tuple(
            make_pattern(
                label=f"{origin}: pattern {each.name or each.whole!r}",
                pieces=each.pieces,
                whole=each.whole,
                join=tuple(map(_step, each.join)),
                split=tuple(map(_step, each.split)),
                trim=None if each.trim is None else _trim(each.trim),
                otherwise=each.otherwise,
                where=each.where,
            )
            for each in found.pattern
        ),
        drop=tuple(found.drop),
        refused=tuple(RefusedNames(names=each.names, remedy=each.remedy) for each in found.refuse),
        sizes=found.sizes,
        text=text,
    )


def _step(text: _StepText) -> PatternStep:
    return PatternStep(
        over=text.over,
        kind=text.as_,
        axis=text.axis,
        widths=text.widths if isinstance(text.widths, dict) else tuple(text.widths),
        groups=text.groups,
        sub=tuple(text.sub),
        copies=tuple(text.copies),
        values=tuple(text.values),
    )


def _trim(text: _TrimText) -> Trim:
    return Trim(to=text.to, axis=text.axis, multiple=text.multiple, padding=text.padding)


learn(globals())
