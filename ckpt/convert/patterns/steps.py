"""Both directions of a step: pieces to one whole, and a whole to its pieces. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.ckpt.convert.patterns.expressions import (
    Average,
    EqualCopies,
    Expression,
    concatenation,
    layer_of,
    slab,
    stacking,
)
from holdfast.ckpt.convert.patterns.language import PatternStep, amount
from holdfast.ckpt.errors import ArgumentError, MismatchError

MOST_PIECES: Final = 1 << 16
"""More pieces than any cluster has ranks: names and shapes from elsewhere may claim more."""


class StepRunner:
    """Runs the steps of one pattern. ``label`` names file and pattern in messages."""

    def __init__(self, sizes: Mapping[str, int], *, label: str, dtype: str) -> None:
        self._sizes, self._label, self._dtype = sizes, label, dtype

    # -- pieces to one whole -----------------------------------------------------------------------

    def join(self, step: PatternStep, pieces: Mapping[str, Expression], *, at: str) -> Expression:
        """Return the whole of the pieces, by their values of the step's hole.

        ``at`` names the tensor. Raises ``MismatchError`` if they do not fit together.
        """
        keys = self._joined_keys(step, list(pieces), at)
        members = [pieces[key] for key in keys]
        if step.kind == "unique":
            if len(members) > 1:
                raise MismatchError(
                    f"{self._label}: {at} is unique, and {len(members)} pieces have it (of "
                    f'{step.over} {", ".join(keys[:6])}); use as = "replicate", or drop the others'
                )
            return members[0]
        self._check_shapes(step, keys, members, at)
        if step.kind == "replicate":
            return self._replicas(members)
        if step.kind == "average":
            return members[0] if len(members) == 1 else self._average(members)
        if step.kind == "stack":
            return stacking(members, self._axis(step, len(members[0].shape) + 1, at))
        return self._concatenated(step, keys, members, at)

    def _joined_keys(self, step: PatternStep, found: Sequence[str], at: str) -> list[str]:
        """Return the values of the hole in order. Raises ``MismatchError`` if some are missing."""
        if step.kind == "unique":
            return sorted(found)
        if step.keys is None:
            keys = sorted(found, key=int)
            count = self._sizes.get(step.over, max(map(int, keys)) + 1)
            if count > MOST_PIECES:
                raise MismatchError(
                    f"{self._label}: {at} would have {count} pieces, at most {MOST_PIECES} are "
                    "possible; check the names"
                )
            wanted = [str(number) for number in range(count)]
        else:
            keys = sorted(found)
            wanted = list(step.keys)
        missing, extra = set(wanted) - set(keys), set(keys) - set(wanted)
        if missing or extra:
            words = f"misses its pieces {_some(missing)}" if missing else "has too many pieces"
            raise MismatchError(
                f"{self._label}: {at} {words} (found {step.over} {_some(keys)}, needed "
                f"{_some(wanted)}); add the missing ones, or give --set {step.over}=NUMBER"
            )
        return wanted

    def _check_shapes(
        self, step: PatternStep, keys: Sequence[str], members: Sequence[Expression], at: str
    ) -> None:
        """Refuse pieces whose shapes differ along another dim than that of fragments."""
        free = None
        if step.kind == "fragment":
            free = self._axis(step, len(members[0].shape), at)
        first = _but(members[0].shape, free)
        for key, member in zip(keys, members, strict=True):
            dims = (len(member.shape), len(members[0].shape))
            if dims[0] != dims[1] or _but(member.shape, free) != first:
                raise MismatchError(
                    f"{self._label}: {at}: the piece {step.over}={keys[0]} has shape "
                    f"{list(members[0].shape)}, {step.over}={key} {list(member.shape)}; pieces "
                    f"that are {step.kind} may differ "
                    + ("along their axis only" if free is not None else "in no dim")
                    + "; correct the pattern"
                )

    def _axis(self, step: PatternStep, dims: int, at: str) -> int:
        if not -dims <= step.axis < dims:
            word = "is a scalar and" if dims == 0 else f"of {dims} dims"
            raise MismatchError(
                f"{self._label}: {at} {word} has no axis {step.axis}; correct the axis, or use "
                'as = "replicate" for scalars'
            )
        return step.axis % dims

    def _replicas(self, members: Sequence[Expression]) -> Expression:
        distinct = tuple(dict.fromkeys(members))
        if len(distinct) == 1:
            return distinct[0]
        return EqualCopies(shape=distinct[0].shape, members=distinct, label=self._label)

    def _average(self, members: Sequence[Expression]) -> Expression:
        return Average(
            shape=members[0].shape, members=tuple(members), dtype=self._dtype, label=self._label
        )

    def _concatenated(
        self, step: PatternStep, keys: Sequence[str], members: Sequence[Expression], at: str
    ) -> Expression:
        axis = self._axis(step, len(members[0].shape), at)
        extents = [member.shape[axis] for member in members]
        self._check_widths(step, keys, extents, at)
        groups = self._groups(step, at)
        if step.sub:
            return self._interleaved(step, members, axis=axis, at=at)
        for key, extent in zip(keys, extents, strict=True):
            self._part(extent, 1, groups, at=f"{at} ({step.over}={key})", of="groups")
        each = [extent // groups for extent in extents]
        return concatenation(
            [
                slab(member, axis, group * width, width)
                for group in range(groups)
                for member, width in zip(members, each, strict=True)
            ],
            axis,
        )

    def _interleaved(
        self, step: PatternStep, members: Sequence[Expression], *, axis: int, at: str
    ) -> Expression:
        """Return all pieces' first part, then all second ones; neighbours may hold copies."""
        subs, copies = self._subs(step, len(members), at)
        starts = [0] * len(members)
        found: list[Expression] = []
        for share, same in zip(subs, copies, strict=True):
            parts = []
            for number, member in enumerate(members):
                width = self._part(member.shape[axis], share, sum(subs), at=at, of="`sub`")
                parts.append(slab(member, axis, starts[number], width))
                starts[number] += width
            for first in range(0, len(parts), same):
                copied = parts[first : first + same]
                if len({part.shape for part in copied}) > 1:
                    raise MismatchError(
                        f"{self._label}: {at}: copies of one part have different widths; correct "
                        "`copies`"
                    )
                found.append(self._replicas(copied))
        return concatenation(found, axis)

    # -- a whole to its pieces ---------------------------------------------------------------------

    def split(self, step: PatternStep, whole: Expression, *, at: str) -> dict[str, Expression]:
        """Return the pieces of a whole, by the value of the step's hole.

        Raises ``MismatchError`` if it cannot be taken apart, ``ArgumentError`` if their number is
        not given.
        """
        dims = len(whole.shape)
        if step.kind == "stack":
            axis = self._axis(step, dims, at)
            count = whole.shape[axis]
            if (known := self._sizes.get(step.over, count)) != count or count > MOST_PIECES:
                raise MismatchError(
                    f"{self._label}: {at} has {count} along axis {axis}, {step.over} is "
                    f"{min(known, MOST_PIECES)}; correct --set {step.over}"
                )
            return {str(index): layer_of(whole, axis, index) for index in range(count)}
        if step.kind != "fragment":
            if step.kind == "unique" and self._sizes.get(step.over, 1) != 1:
                raise ArgumentError(
                    f"{self._label}: {at} is unique, and the pattern does not say which "
                    f"{step.over} gets it; leave --set {step.over} out or make it 1"
                )
            if step.kind == "unique":
                return {step.values[0] if step.values else "0": whole}
            return {str(number): whole for number in range(self._count(step))}
        return self._fragments(step, whole, self._axis(step, dims, at), at)

    def _fragments(
        self, step: PatternStep, whole: Expression, axis: int, at: str
    ) -> dict[str, Expression]:
        keys = step.keys or tuple(str(number) for number in range(self._count(step)))
        widths = self._widths(step, len(keys), at)
        subs, copies = self._subs(step, len(keys), at)
        if max(copies) > 1 and len(set(widths)) > 1:
            raise MismatchError(
                f"{self._label}: {at}: `copies` with widths that differ, {widths}; leave `widths` "
                "out"
            )
        groups, extent = self._groups(step, at), whole.shape[axis]
        unit = groups * sum(
            share * sum(widths[::same]) for share, same in zip(subs, copies, strict=True)
        )
        found: dict[str, Expression] = {}
        for number, key in enumerate(keys):
            blocks: list[Expression] = []
            for group in range(groups):
                at_share = group * (unit // groups)
                for share, same in zip(subs, copies, strict=True):
                    own = number // same
                    before = at_share + share * sum(widths[::same][:own])
                    start = self._part(extent, before, unit, at=at, of="the widths")
                    width = self._part(extent, share * widths[number], unit, at=at, of="the widths")
                    blocks.append(slab(whole, axis, start, width))
                    at_share += share * sum(widths[::same])
            found[key] = concatenation(blocks, axis)
        return found

    # -- numbers -----------------------------------------------------------------------------------

    def _amount(self, value: int | str, *, least: int, what: str) -> int:
        found = amount(value, self._sizes, label=self._label)
        if not least <= found < 1 << 63:
            raise ArgumentError(f"{self._label}: {what} is {found}; give {least} or more")
        return found

    def _count(self, step: PatternStep) -> int:
        """Return the number of pieces. Raises ``ArgumentError`` if it is not given."""
        if step.widths and step.over not in self._sizes:
            return len(step.widths)
        count = self._amount(step.over, least=1, what=f"the size {step.over}")
        if count > MOST_PIECES:
            raise ArgumentError(f"{self._label}: {step.over} is {count}, over {MOST_PIECES}")
        return count

    def _groups(self, step: PatternStep, at: str) -> int:
        groups = self._amount(step.groups, least=1, what=f"groups of {at}")
        if groups > MOST_PIECES:
            raise ArgumentError(f"{self._label}: {at} has {groups} groups, over {MOST_PIECES}")
        return groups

    def _subs(self, step: PatternStep, count: int, at: str) -> tuple[list[int], list[int]]:
        """Return the shares of the parts inside a piece, and the copies of each."""
        subs = [self._amount(each, least=1, what=f"`sub` of {at}") for each in step.sub] or [1]
        same = [self._amount(each, least=1, what=f"`copies` of {at}") for each in step.copies]
        same = same or [1] * len(subs)
        for each in same:
            if count % each:
                raise MismatchError(
                    f"{self._label}: {at}: {count} pieces are not {each} copies each; correct "
                    "`copies`"
                )
        return subs, same

    def _widths(self, step: PatternStep, count: int, at: str) -> list[int]:
        given = step.widths.values() if isinstance(step.widths, Mapping) else step.widths
        widths = [self._amount(each, least=0, what=f"a width of {at}") for each in given]
        if widths and (len(widths) != count or not sum(widths)):
            raise MismatchError(
                f"{self._label}: {at}: {len(widths)} widths {widths} for {count} pieces; give one "
                "for each, not all of them 0"
            )
        return widths or [1] * count

    def _check_widths(
        self, step: PatternStep, keys: Sequence[str], extents: Sequence[int], at: str
    ) -> None:
        """Refuse pieces whose extents are not in the ratio of the widths."""
        if not step.widths:
            return
        widths, total = self._widths(step, len(keys), at), sum(extents)
        if any(
            extent * sum(widths) != total * width
            for extent, width in zip(extents, widths, strict=True)
        ):
            raise MismatchError(
                f"{self._label}: {at}: its pieces {step.over}={_some(keys)} have the widths "
                f"{list(extents)}, which are not in the ratio {widths}; correct `widths`, or the "
                "sizes that it uses"
            )

    def _part(self, extent: int, share: int, total: int, *, at: str, of: str) -> int:
        if extent * share % total:
            raise MismatchError(
                f"{self._label}: {at}: the widths do not add up: {share} of {total} parts of "
                f"{extent} is no whole number; correct {of}, or the sizes that it uses"
            )
        return extent * share // total


def _but(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    return shape if axis is None else shape[:axis] + shape[axis + 1 :]


def _some(names: Sequence[str] | set[str]) -> str:
    found = sorted(names, key=lambda name: (len(name), name))
    return ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
