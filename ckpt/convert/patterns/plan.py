"""The plan of a pattern file for one source: every new tensor as an expression. Pure.

A plan names what was left out, and the padding whose zeros must be checked before anything is
believed. It is made from names, shapes and dtypes; no element is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import TypeAlias

from holdfast.ckpt.convert.patterns.expressions import (
    Expression,
    Padding,
    StoredTensor,
    concatenation,
    slab,
    stored_names,
)
from holdfast.ckpt.convert.patterns.language import (
    PatternFile,
    PatternStep,
    PiecePattern,
    Trim,
    amount,
)
from holdfast.ckpt.convert.patterns.steps import StepRunner
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.element_types import dtype_of
from holdfast.ckpt.geometry.layout import TensorSpec

Values: TypeAlias = Mapping[str, str]
"""The values of a name's holes."""

_Key: TypeAlias = tuple[str, ...]
"""The holes of a pattern's steps."""

_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingCheck:
    """Padding that is cut off, to be compared with zeros; ``at`` names tensor and pattern."""

    at: str
    of: Expression
    axis: int
    start: int
    extent: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternPlan:
    """The new tensors, by name. ``used`` maps stored names to the new names that need them."""

    specs: Mapping[str, TensorSpec]
    expressions: Mapping[str, Expression]
    aliases: Mapping[str, str] = field(default_factory=dict)
    used: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checks: tuple[PaddingCheck, ...] = ()
    told: tuple[str, ...] = ()


def make_plan(
    file: PatternFile,
    specs: Mapping[str, TensorSpec],
    *,
    aliases: Mapping[str, str],
    sizes: Mapping[str, int],
    reverse: bool,
    origin: str,
) -> PatternPlan:
    """Return the plan for the tensors of a source, pieces to wholes or, with ``reverse``, back.

    Raises ``MismatchError`` for a name that no pattern or two take, and for pieces that do not fit.
    """
    planner = _Planner(file, specs, aliases=aliases, sizes={**file.sizes, **sizes}, reverse=reverse)
    return planner.plan(origin)


def left_out(names: Sequence[str], kind: str, file: PatternFile) -> str:
    """Return the words about names that a file drops."""
    more = ", …" if len(names) > _SHOWN else ""
    shown = ", ".join(names[:_SHOWN])
    return f"{len(names)} {kind} were left out, as {file.origin} says: {shown}{more}"


def chosen_pattern(
    file: PatternFile, name: str, *, reverse: bool, origin: str
) -> tuple[PiecePattern, Values] | None:
    """Return the pattern of a name and the values of its holes; None if it is dropped.

    Raises ``MismatchError`` if none or two match.
    """
    if any(fnmatchcase(name, glob) for glob in file.drop):
        return None
    for refused in file.refused:
        if fnmatchcase(name, refused.names):
            raise MismatchError(
                f"{origin}: {name}: {file.origin} refuses {refused.names}: {refused.remedy}"
            )
    found = list(_matches(file.patterns, name, reverse=reverse))
    own = [each for each in found if not each[0].otherwise] or found
    if len(own) == 1:
        return own[0]
    if own:
        labels = " and ".join(pattern.label for pattern, _ in own[:2])
        raise MismatchError(
            f"{origin}: {name}: two patterns match, {labels}; make one of them narrower (`where`)"
        )
    raise MismatchError(
        f"{origin}: {name}: no pattern of {file.origin} matches; add one, or name it under `drop` "
        "to leave it out"
    )


def _matches(
    patterns: Sequence[PiecePattern], name: str, *, reverse: bool
) -> Iterable[tuple[PiecePattern, Values]]:
    for pattern in patterns:
        values = (pattern.whole if reverse else pattern.pieces).match(name)
        if values is not None:
            yield pattern, values


class _Planner:
    def __init__(
        self,
        file: PatternFile,
        specs: Mapping[str, TensorSpec],
        *,
        aliases: Mapping[str, str],
        sizes: Mapping[str, int],
        reverse: bool,
    ) -> None:
        self._file, self._sizes, self._reverse = file, sizes, reverse
        self._specs, self._aliases = specs, aliases
        self._checks: list[PaddingCheck] = []
        self._told: list[str] = []
        self._new: dict[str, tuple[TensorSpec, Expression]] = {}
        self._tied: set[str] = set()
        self._makers: dict[str, str] = {}

    def plan(self, origin: str) -> PatternPlan:
        groups, dropped = self._groups(origin)
        for (number, shared), members in groups.items():
            self._add(self._file.patterns[number], dict(shared), members, origin)
        if dropped:
            self._told.append(left_out(dropped, "tensors", self._file))
        aliases = self._new_aliases()
        used: dict[str, list[str]] = {}
        for name, (_, made) in self._new.items():
            for stored in dict.fromkeys(stored_names(made)):
                used.setdefault(stored, []).append(name)
        kept = {name: each for name, each in self._new.items() if name not in aliases}
        return PatternPlan(
            specs={name: spec for name, (spec, _) in kept.items()},
            expressions={name: made for name, (_, made) in kept.items()},
            aliases=aliases,
            used={stored: tuple(names) for stored, names in used.items()},
            checks=tuple(self._checks),
            told=tuple(self._told),
        )

    def _groups(
        self, origin: str
    ) -> tuple[
        dict[tuple[int, tuple[tuple[str, str], ...]], dict[tuple[str, ...], str]], list[str]
    ]:
        """Return the source's names by pattern and shared holes, then by the holes of its steps."""
        groups: dict[tuple[int, tuple[tuple[str, str], ...]], dict[tuple[str, ...], str]] = {}
        dropped: list[str] = []
        numbers = {id(pattern): number for number, pattern in enumerate(self._file.patterns)}
        for name in (*self._specs, *self._aliases):
            chosen = chosen_pattern(self._file, name, reverse=self._reverse, origin=origin)
            if chosen is None:
                dropped.append(name)
                continue
            pattern, values = chosen
            holes = [step.over for step in self._inward(pattern)]
            shared = tuple((hole, values[hole]) for hole in values if hole not in holes)
            members = groups.setdefault((numbers[id(pattern)], shared), {})
            members[tuple(values[hole] for hole in holes)] = name
        return groups, dropped

    def _inward(self, pattern: PiecePattern) -> tuple[PatternStep, ...]:
        """Return the steps that put tensors together, in their order."""
        return pattern.split[::-1] if self._reverse else pattern.join

    def _outward(self, pattern: PiecePattern) -> tuple[PatternStep, ...]:
        """Return the steps that take the whole apart, in their order."""
        return pattern.join[::-1] if self._reverse else pattern.split

    def _add(
        self,
        pattern: PiecePattern,
        shared: Values,
        members: Mapping[tuple[str, ...], str],
        origin: str,
    ) -> None:
        """Plan the tensors that one group of names makes."""
        first = next(iter(members.values()))
        at, label = f"{origin}: {first}", pattern.label
        dtypes = {self._spec(name).dtype: name for name in members.values()}
        if len(dtypes) > 1:
            (one, a), (other, b) = list(dtypes.items())[:2]
            raise MismatchError(
                f"{label}: {origin}: {a} is {one}, {b} is {other}; save the pieces in one dtype"
            )
        dtype = next(iter(dtypes))
        runner = StepRunner(self._sizes, label=label, dtype=dtype)
        entries: dict[tuple[str, ...], Expression] = {
            key: StoredTensor(name=self._aliases.get(name, name), shape=self._spec(name).shape)
            for key, name in members.items()
        }
        for step in self._inward(pattern):
            entries = _joined(runner, step, entries, at)
        whole = entries[()]
        if pattern.trim is not None:
            whole = self._trimmed(pattern.trim, whole, label=label, at=at, dtype=dtype)
        made: dict[_Key, Expression] = {(): whole}
        for step in self._outward(pattern):
            made = {
                (*keys, value): piece
                for keys, each in made.items()
                for value, piece in runner.split(step, each, at=at).items()
            }
        holes = [step.over for step in self._outward(pattern)]
        target = pattern.pieces if self._reverse else pattern.whole
        tied = any(name in self._aliases for name in members.values())
        for keys, piece in made.items():
            name = target.fill({**shared, **dict(zip(holes, keys, strict=True))})
            if name in self._new:
                raise MismatchError(
                    f"{label}: {origin}: {first} would be {name}, which {self._makers[name]} makes "
                    "too; give one of the two another name"
                )
            spec = TensorSpec(fqn=name, dtype=dtype, shape=piece.shape)
            self._new[name], self._makers[name] = (spec, piece), label
            if tied:
                self._tied.add(name)

    def _spec(self, name: str) -> TensorSpec:
        return self._specs[self._aliases.get(name, name)]

    def _trimmed(
        self, trim: Trim, whole: Expression, *, label: str, at: str, dtype: str
    ) -> Expression:
        """Return the whole without its padding or, in reverse, with it."""
        to = amount(trim.to, self._sizes, label=label)
        if not -len(whole.shape) <= trim.axis < len(whole.shape):
            raise MismatchError(
                f"{label}: {at} of {len(whole.shape)} dims has no axis {trim.axis} to trim"
            )
        axis = trim.axis % len(whole.shape)
        extent = whole.shape[axis]
        if not self._reverse:
            if not 0 < to <= extent:
                raise MismatchError(
                    f"{label}: {at} has {extent} along axis {axis}, trimmed to {to}; correct the "
                    f"size {trim.to}"
                )
            if to == extent:
                return whole
            if trim.padding == "drop":
                self._told.append(
                    f"{at}: {extent - to} of {extent} along axis {axis} were dropped as padding"
                )
            else:
                self._checks.append(
                    PaddingCheck(
                        at=f"{label}: {at}",
                        of=whole,
                        axis=axis,
                        start=to,
                        extent=extent - to,
                        dtype=dtype,
                    )
                )
            return slab(whole, axis, 0, to)
        if extent != to:
            raise MismatchError(
                f"{label}: {at} has {extent} along axis {axis}, the size {trim.to} is {to}; "
                "correct it"
            )
        multiple = amount(trim.multiple, self._sizes, label=label)
        if multiple < 1 or not (missing := -to % multiple):
            return whole
        shape = (*whole.shape[:axis], missing, *whole.shape[axis + 1 :])
        zeros = Padding(shape=shape, itemsize=dtype_of(dtype, origin=at).itemsize)
        return concatenation([whole, zeros], axis)

    def _new_aliases(self) -> dict[str, str]:
        """Return the new names of tensors that were tied at the source and still are one."""
        if not self._tied:
            return {}
        first: dict[Expression, str] = {}
        aliases: dict[str, str] = {}
        in_order = chain(
            (name for name in self._new if name not in self._tied),
            (name for name in self._new if name in self._tied),
        )
        for name in in_order:
            made = self._new[name][1]
            if name in self._tied and made in first:
                aliases[name] = first[made]
            else:
                first.setdefault(made, name)
        return aliases


def _joined(
    runner: StepRunner,
    step: PatternStep,
    entries: Mapping[tuple[str, ...], Expression],
    at: str,
) -> dict[tuple[str, ...], Expression]:
    """Put together the entries that differ in the first value of their keys only."""
    grouped: dict[tuple[str, ...], dict[str, Expression]] = {}
    for (value, *rest), piece in entries.items():
        grouped.setdefault(tuple(rest), {})[value] = piece
    return {rest: runner.join(step, pieces, at=at) for rest, pieces in grouped.items()}
