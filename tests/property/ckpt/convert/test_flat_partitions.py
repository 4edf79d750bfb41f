"""ZeRO's partitions joined again are the parameters, for any shapes, ranks and stage."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ckpt.convert.deepspeed.partitions import (
    FlatPart,
    Parts,
    fault_of_parts,
    packed,
    recorded,
    sharded,
)

Vector = npt.NDArray[np.int64]

counts_of = st.lists(st.integers(0, 23), max_size=6)
ranks_of = st.integers(1, 6)


def values_of(counts: list[int]) -> list[Vector]:
    """Return parameters in which every element differs."""
    ends = np.cumsum([0, *counts])
    return [np.arange(a, b) for a, b in pairwise(ends)]


def joined(parts: Parts, vectors: list[Vector]) -> list[int]:
    return [int(x) for p in parts for x in vectors[p.rank][p.start : p.start + p.count]]


def whole(counts: list[int], parts: list[Parts], vectors: list[Vector]) -> bool:
    named = {str(i): count for i, count in enumerate(counts)}
    assert fault_of_parts(named, parts, lengths=[len(v) for v in vectors]) is None
    return [joined(each, vectors) for each in parts] == [list(v) for v in values_of(counts)]


@given(counts=counts_of, ranks=ranks_of)
def test_stage_3_cuts_every_parameter_by_itself(counts: list[int], ranks: int) -> None:
    vectors: list[list[int]] = [[] for _ in range(ranks)]
    for value in values_of(counts):
        padded = [*value, *[-1] * (-len(value) % ranks)]
        size = len(padded) // ranks
        for rank in range(ranks):
            vectors[rank] += padded[rank * size : (rank + 1) * size]
    assert whole(counts, sharded(counts, ranks=ranks), [np.array(v, int) for v in vectors])


@given(counts=counts_of, ranks=ranks_of, align=st.integers(1, 4), data=st.data())
def test_stages_1_and_2_cut_the_whole_vector(
    counts: list[int], ranks: int, align: int, data: st.DataObject
) -> None:
    gaps = [data.draw(st.integers(0, 3)) for _ in counts]
    flat: list[int] = []
    for value, gap in zip(values_of(counts), gaps, strict=True):
        flat += [*value, *[-1] * gap]
    flat += [-1] * (-len(flat) % (align * ranks))
    size = len(flat) // ranks
    vectors = [np.array(flat[r * size : (r + 1) * size], int) for r in range(ranks)]
    parts = packed(counts, size=size or 1, gaps=gaps)
    assert whole(counts, parts, vectors)
    names = [str(i) for i in range(len(counts))]
    slices = [
        {
            name: (part.start, part.count)
            for name, each in zip(names, parts, strict=True)
            for part in each
            if part.rank == rank
        }
        for rank in range(ranks)
    ]
    assert recorded(names, slices) == parts


def test_a_part_too_few_beyond_or_twice_is_a_fault() -> None:
    def fault(*parts: FlatPart) -> str | None:
        return fault_of_parts({"a": 3, "b": 2}, [parts[:-1], parts[-1:]], lengths=[4, 4])

    first, other = FlatPart(rank=0, start=0, count=3), FlatPart(rank=1, start=0, count=2)
    assert fault(first, other) is None
    assert "has 3 elements, and its partitions have 2" in str(
        fault(FlatPart(rank=0, start=0, count=2), other)
    )
    assert "ends at element 5" in str(fault(first, FlatPart(rank=1, start=3, count=2)))
    assert "overlap" in str(fault(first, FlatPart(rank=0, start=1, count=2)))
    assert "of rank 2" in str(fault(first, FlatPart(rank=2, start=0, count=2)))
