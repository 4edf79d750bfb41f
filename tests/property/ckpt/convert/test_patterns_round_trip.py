"""Any pattern, forth and back, gives the bits that were there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from doubles.interchange import ArraySource
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ckpt.convert.interchange import cut, itemsize_of
from holdfast.ckpt.convert.patterns.choice import Patterns
from holdfast.ckpt.convert.patterns.language import (
    PatternFile,
    PatternStep,
    Trim,
    make_pattern,
)
from holdfast.ckpt.convert.patterns.source import PatternedSource
from holdfast.ckpt.geometry.grid import whole

Array = npt.NDArray[Any]

KINDS = ("fragment", "stack", "replicate", "average")


@dataclass
class Outward:
    """Steps away from the whole; ``dims`` are the dims that are left, ``units`` their divisors."""

    dims: list[int]
    units: dict[int, int]
    steps: list[PatternStep] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)


@st.composite
def steps(draw: st.DrawFn, side: Outward, prefix: str) -> None:
    """Draw up to three steps from the whole outward."""
    for number in range(draw(st.integers(0, 3))):
        over, kind = f"{prefix}{number}", draw(st.sampled_from(KINDS))
        at = draw(st.integers(0, len(side.dims) - 1)) if side.dims else 0
        if kind in ("fragment", "stack") and not side.dims:
            continue
        axis = at - len(side.dims) * draw(st.integers(0, 1))
        if kind == "stack":
            side.units[side.dims.pop(at)] *= 1
            side.steps.append(PatternStep(over=over, kind=kind, axis=at))
        elif kind == "fragment":
            side.steps.append(draw(fragments(side, over, at, axis)))
        else:
            side.sizes[over] = draw(st.integers(1, 3))
            side.steps.append(PatternStep(over=over, kind=kind))


@st.composite
def fragments(draw: st.DrawFn, side: Outward, over: str, at: int, axis: int) -> PatternStep:
    """Draw a step of fragments: with widths, in groups, or with parts inside of pieces."""
    count = draw(st.integers(1, 4))
    form = draw(st.sampled_from(["even", "widths", "named", "groups", "sub"]))
    widths: Any = ()
    groups, sub, copies = 1, (), ()
    if form in ("widths", "named", "groups"):
        drawn = tuple(draw(st.lists(st.integers(1, 3), min_size=count, max_size=count)))
        named = {f"n{i}": width for i, width in enumerate(drawn)}
        widths = named if form == "named" else drawn
        groups = draw(st.integers(1, 3)) if form == "groups" else 1
        unit = groups * sum(drawn)
    elif form == "sub":
        sub = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
        of = [n for n in range(1, count + 1) if count % n == 0]
        copies = tuple(draw(st.sampled_from(of)) for _ in sub)
        unit = sum(share * count // same for share, same in zip(sub, copies, strict=True))
    else:
        unit = count
    side.units[side.dims[at]] *= unit
    if form != "named":
        side.sizes[over] = count
    return PatternStep(
        over=over, kind="fragment", axis=axis, widths=widths, groups=groups, sub=sub, copies=copies
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[PatternFile, dict[str, int], tuple[int, ...]]:
    """Draw a pattern, the sizes that it needs, and the shape of the whole without padding."""
    dims = draw(st.integers(0, 3))
    units = dict.fromkeys(range(dims), 1)
    pieces, made = Outward(list(range(dims)), units), Outward(list(range(dims)), units)
    draw(steps(pieces, "p"))
    only_pieces = dict(units)
    draw(steps(made, "t"))
    shape = [units[dim] * draw(st.integers(1, 2)) for dim in range(dims)]
    trim = None
    free = [d for d in range(dims) if units[d] == only_pieces[d] and d in made.dims]
    if free and draw(st.booleans()):
        axis = draw(st.sampled_from(free))
        to = draw(st.integers(1, shape[axis]))
        trim = Trim(to=to, axis=axis, multiple=shape[axis])
        shape[axis] = to
    pattern = make_pattern(
        label="drawn",
        pieces="a" + "".join(f".{{{step.over}}}" for step in pieces.steps),
        whole="b" + "".join(f".{{{step.over}}}" for step in made.steps),
        join=tuple(pieces.steps[::-1]),
        split=tuple(made.steps),
        trim=trim,
    )
    file = PatternFile(origin="drawn", patterns=(pattern,))
    return file, {**pieces.sizes, **made.sizes}, tuple(shape)


def arrays_of(source: PatternedSource, most_bytes: int) -> dict[str, Array]:
    """Return the raw elements of every tensor, read in boxes."""
    found = {}
    for name, spec in source.specs.items():
        found[name] = array = np.zeros(spec.shape, np.uint16)
        for box in cut(whole(spec.shape), itemsize=itemsize_of(spec), most_bytes=most_bytes):
            data = np.frombuffer(source.read(name, box), np.uint16)
            array[box.slices] = data.reshape(box.shape)
    return found


def seen(
    file: PatternFile, arrays: Mapping[str, Array], sizes: Mapping[str, int], *, reverse: bool
) -> PatternedSource:
    source = ArraySource({name: (array, "bfloat16") for name, array in arrays.items()})
    return PatternedSource(source, Patterns(file=file, sizes=sizes, reverse=reverse))


@given(case=cases(), seed=st.integers(0, 2**32 - 1), most_bytes=st.integers(2, 200))
def test_forth_and_back_gives_the_bits(
    case: tuple[PatternFile, dict[str, int], tuple[int, ...]], seed: int, most_bytes: int
) -> None:
    """Start with a whole in one tensor: its parts, their pieces, and both again."""
    file, sizes, shape = case
    bits = np.random.default_rng(seed).integers(0, 1 << 16, shape, dtype=np.uint16)
    pattern = file.patterns[0]
    parts_only = PatternFile(
        origin="parts",
        patterns=(
            make_pattern(label="parts", pieces="a", whole=pattern.whole.text, split=pattern.split),
        ),
    )
    parts = arrays_of(seen(parts_only, {"a": bits}, sizes, reverse=False), most_bytes)
    pieces = arrays_of(seen(file, parts, sizes, reverse=True), most_bytes)
    again = arrays_of(seen(file, pieces, sizes, reverse=False), most_bytes)
    assert again.keys() == parts.keys()
    for name, array in parts.items():
        np.testing.assert_array_equal(again[name], array)
    back = arrays_of(seen(file, again, sizes, reverse=True), most_bytes)
    assert back.keys() == pieces.keys()
    for name, array in pieces.items():
        np.testing.assert_array_equal(back[name], array)
    assert prod(shape) <= sum(array.size for array in pieces.values())
