"""Pieces, layouts and headers for arbitrary shapes."""

from __future__ import annotations

import json
from math import prod

from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.convert.interchange import cut, nbytes_of
from holdfast.ckpt.convert.safetensors_header import (
    NAME_OF,
    build_header,
    by_alignment,
    parse_header,
)
from holdfast.ckpt.convert.target_layout import SplitRule, TargetLayout
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.geometry.grid import fault_of_cover
from holdfast.ckpt.geometry.layout import Box, TensorSpec

extents = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(
    shape=extents, itemsize=st.sampled_from([1, 2, 4, 16]), most=st.integers(1, 200), data=st.data()
)
def test_pieces_are_the_box_once_in_order_and_fit(
    shape: tuple[int, ...], itemsize: int, most: int, data: st.DataObject
) -> None:
    offset = tuple(data.draw(st.integers(0, 5)) for _ in shape)
    pieces = list(cut(Box(offset=offset, shape=shape), itemsize=itemsize, most_bytes=most))
    assert all(piece.size * itemsize <= max(most, itemsize) for piece in pieces)
    moved = [
        Box(offset=tuple(o - s for o, s in zip(p.offset, offset, strict=True)), shape=p.shape)
        for p in pieces
    ]
    assert fault_of_cover(shape, moved) is None
    at = 0
    for piece in moved:  # each is one run of the box's elements, behind the one before
        first = 0
        for o, n in zip(piece.offset, shape, strict=True):
            first = first * n + o
        last = 0
        for o, s, n in zip(piece.offset, piece.shape, shape, strict=True):
            last = last * n + o + s - 1
        assert (first, last + 1) == (at, at + piece.size)
        at += piece.size


@given(
    shapes=st.lists(extents, min_size=1, max_size=4),
    mesh=st.dictionaries(st.sampled_from(["dp", "tp", "ep"]), st.integers(1, 4), min_size=1),
    most=st.integers(8, 400),
    data=st.data(),
)
def test_any_layout_holds_every_element_once_in_chunks_that_fit(
    shapes: list[tuple[int, ...]], mesh: dict[str, int], most: int, data: st.DataObject
) -> None:
    specs = {str(n): TensorSpec(fqn=str(n), dtype="int16", shape=s) for n, s in enumerate(shapes)}
    rules = []
    for fqn, spec in specs.items():
        if spec.shape and data.draw(st.booleans()):
            dim = data.draw(st.integers(-len(spec.shape), len(spec.shape) - 1))
            rules.append(
                SplitRule(glob=fqn, axis=data.draw(st.sampled_from(sorted(mesh))), dim=dim)
            )
    layout = TargetLayout(mesh=mesh, rules=tuple(rules))
    writers = layout.writers(specs, most_bytes=most)
    assert len(writers) == prod(mesh.values())
    for fqn, spec in specs.items():
        chunks = [c for w in writers if fqn in w for c in w[fqn].chunks]
        assert fault_of_cover(spec.shape, [chunk.box for chunk in chunks]) is None
        assert all(chunk.nbytes <= max(most, 2) for chunk in chunks)


names = st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__")


@given(
    found=st.dictionaries(names, st.tuples(st.sampled_from(sorted(NAME_OF)), extents), max_size=5),
    metadata=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
)
def test_a_header_says_what_it_was_built_from(
    found: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    specs = [
        TensorSpec(fqn=name, dtype=dtype, shape=shape or (2,) if "float4" in dtype else shape)
        for name, (dtype, shape) in found.items()
    ]
    raw = build_header(by_alignment(specs), metadata)
    nbytes = len(raw) + sum(map(nbytes_of, specs))
    header = parse_header(raw[8:], file_bytes=nbytes, origin="f")
    assert header.specs == {spec.fqn: spec for spec in specs}
    assert header.metadata == metadata
    assert len(raw) % 8 == 0


entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "F4", "x"]),
        "shape": st.lists(st.integers(-1, 4) | st.just(1 << 62) | st.floats(), max_size=3),
        "data_offsets": st.lists(st.integers(-1, 20), min_size=1, max_size=3),
    }
)


@settings(max_examples=examples(300))
@given(
    raw=st.binary(max_size=60)
    | st.dictionaries(names, entries, max_size=3).map(lambda d: json.dumps(d).encode()),
    data_bytes=st.integers(0, 40),
)
def test_no_header_does_worse_than_being_refused(raw: bytes, data_bytes: int) -> None:
    try:
        header = parse_header(raw, file_bytes=8 + len(raw) + data_bytes, origin="f")
    except CkptError as error:
        assert str(error).startswith("f: ")
        return
    for name, spec in header.specs.items():
        start = header.starts[name]
        assert 8 + len(raw) <= start <= start + nbytes_of(spec) <= 8 + len(raw) + data_bytes
