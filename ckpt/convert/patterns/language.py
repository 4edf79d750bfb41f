"""The language of patterns: the values that a pattern file is read into, each checked. Pure.

A pattern says how foreign *pieces* form tensors. Its ``join`` steps put pieces together to one
whole, ``trim`` takes padding off, and its ``split`` steps take the whole apart. Each step works
along one hole of a name. The language is that of Universal Checkpointing (Lian et al.): unique,
replicate, average and fragment, with fused parts inside of fragments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from holdfast.ckpt.convert.patterns.names import NUMBER, NameTemplate, template
from holdfast.ckpt.errors import ArgumentError

Amount: TypeAlias = int | str
"""A number, or the name of a size that the user gives."""

KINDS: Final = ("unique", "replicate", "average", "fragment", "stack")
PADDINGS: Final = ("zero", "drop")
_ONLY_FRAGMENT: Final = ("widths", "groups", "sub", "copies")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternStep:
    """One step along the hole ``over``.

    ``widths`` are the pieces' shares of ``axis``, by value of the hole or in order; none: equal, or
    as the pieces are. The whole is ``groups`` times the sequence of all pieces' parts. With
    ``sub``, each piece is a sequence of parts with these shares, and the whole is first all pieces'
    first part, then all second ones; ``copies`` says how many neighbours hold the same part.
    ``values`` are the texts that the hole of a unique piece may have, the one to write first.
    """

    over: str
    kind: str
    axis: int = 0
    widths: Mapping[str, Amount] | tuple[Amount, ...] = ()
    groups: Amount = 1
    sub: tuple[Amount, ...] = ()
    copies: tuple[Amount, ...] = ()
    values: tuple[str, ...] = ()

    def check(self, label: str) -> None:
        """Raise ``ArgumentError`` for a step that has no meaning."""
        if self.kind not in KINDS:
            raise ArgumentError(f"{label}: as = {self.kind!r}; choose one of {', '.join(KINDS)}")
        if self.kind != "fragment" and (self.widths or self.groups != 1 or self.sub or self.copies):
            raise ArgumentError(
                f"{label}: {', '.join(_ONLY_FRAGMENT)} are for fragments, and the step over "
                f"{self.over} is {self.kind}; leave them out"
            )
        if self.values and self.kind != "unique":
            raise ArgumentError(f"{label}: {self.kind} has no values; they are for unique pieces")
        if self.kind not in ("fragment", "stack") and self.axis:
            raise ArgumentError(f"{label}: {self.kind} has no axis; leave it out")
        if self.sub and self.groups != 1:
            raise ArgumentError(f"{label}: a step has `sub` or `groups`; use two steps")
        if self.copies and len(self.copies) != len(self.sub):
            raise ArgumentError(
                f"{label}: {len(self.copies)} copies for {len(self.sub)} parts of `sub`; give one "
                "for each"
            )

    @property
    def keys(self) -> tuple[str, ...] | None:
        """The values of the hole, where they are names; None where they are numbers."""
        named = tuple(self.widths) if isinstance(self.widths, Mapping) else self.values
        return named or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """Cut the whole to ``to`` along ``axis``; before, it is a multiple of ``multiple``.

    ``padding`` is ``zero``, where anything else there is refused, or ``drop``, which is reported.
    """

    to: Amount
    axis: int = 0
    multiple: Amount = 1
    padding: str = "zero"

    def check(self, label: str) -> None:
        """Raise ``ArgumentError`` for a word that is none."""
        if self.padding not in PADDINGS:
            raise ArgumentError(
                f"{label}: padding = {self.padding!r}; choose one of {', '.join(PADDINGS)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecePattern:
    """Pieces, the tensors that they form, and the steps between them. ``label`` is for messages.

    One with ``otherwise`` takes the names that no other pattern of its file takes.
    """

    label: str
    pieces: NameTemplate
    whole: NameTemplate
    join: tuple[PatternStep, ...] = ()
    split: tuple[PatternStep, ...] = ()
    trim: Trim | None = None
    otherwise: bool = False

    @property
    def keeps_shape(self) -> bool:
        """True if a piece is the whole; then plain values may pass, too."""
        kinds = {step.kind for step in self.join}
        return kinds <= {"unique", "replicate"} and not self.split and self.trim is None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedNames:
    """Names that a file refuses, as a glob, and what helps."""

    names: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternFile:
    """All patterns of one file. ``drop`` are globs of names that are left out, and reported.

    ``sizes`` are the numbers that the file itself gives, ``text`` is the file as written.
    """

    origin: str
    patterns: tuple[PiecePattern, ...]
    drop: tuple[str, ...] = ()
    refused: tuple[RefusedNames, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    text: str = ""


def make_pattern(
    *,
    label: str,
    pieces: str,
    whole: str,
    join: tuple[PatternStep, ...] = (),
    split: tuple[PatternStep, ...] = (),
    trim: Trim | None = None,
    otherwise: bool = False,
    where: Mapping[str, str] | None = None,
) -> PiecePattern:
    """Return a checked pattern; ``where`` are regular expressions for holes.

    Raises ``ArgumentError`` naming ``label``.
    """
    shapes = dict(where or {})
    for step in (*join, *split):
        step.check(label)
        if step.over in shapes:
            raise ArgumentError(f"{label}: `where` {step.over}, which a step counts; leave it out")
        shapes[step.over] = "|".join(map(re.escape, step.keys)) if step.keys else NUMBER
    if trim is not None:
        trim.check(label)
    found = PiecePattern(
        label=label,
        pieces=template(pieces, shapes=shapes, label=label),
        whole=template(whole, shapes=shapes, label=label),
        join=join,
        split=split,
        trim=trim,
        otherwise=otherwise,
    )
    _check_holes(found)
    if unknown := shapes.keys() - {*found.pieces.holes, *found.whole.holes}:
        raise ArgumentError(f"{label}: no name has the hole {{{min(unknown)}}}; correct its name")
    return found


def _check_holes(pattern: PiecePattern) -> None:
    """Refuse holes that only one side has and no step makes or takes."""
    label = pattern.label
    joined = [step.over for step in pattern.join]
    made = [step.over for step in pattern.split]
    if len({*joined, *made}) < len(joined) + len(made):
        raise ArgumentError(f"{label}: two steps over one hole; give each its own")
    for side, other, own, steps in (
        ("pieces", pattern.whole, pattern.pieces, joined),
        ("whole", pattern.pieces, pattern.whole, made),
    ):
        for hole in own.holes:
            if (hole in steps) == (hole in other.holes):
                where = "is in both names" if hole in steps else "has no step"
                raise ArgumentError(
                    f"{label}: {{{hole}}} of {side} {where}; a hole is either in both names, or in "
                    "one, with a step over it"
                )
        for hole in steps:
            if hole not in own.holes:
                raise ArgumentError(f"{label}: the step over {hole}: {side} has no such hole")


def amount(value: Amount, sizes: Mapping[str, int], *, label: str) -> int:
    """Return a number, or the size of that name. Raises ``ArgumentError`` if nobody gave it."""
    if isinstance(value, int):
        return value
    if value not in sizes:
        raise ArgumentError(
            f"{label}: needs the size {value}, which is not given; add --set {value}=NUMBER to "
            f"the command, or sizes={{{value!r}: NUMBER}}"
        )
    return sizes[value]
