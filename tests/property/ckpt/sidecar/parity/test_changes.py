"""Changed bytes of a column are always included, and unchanged ones are not."""

from __future__ import annotations

import numpy as np
from doubles.blocks import make_world
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.native.sums import SUM_BYTES, same_runs, sums_of
from holdfast.ckpt.parity.stripes import Geometry, Span
from holdfast.ckpt.sidecar.parity.changes import batches, changed_ranges


def entries(sizes: list[int]) -> dict[int, BlockEntry]:
    return {
        rank: BlockEntry(
            generation=1, step=1, rank=rank, payload_bytes=0, index_bytes=size, index_crc32c=0
        )
        for rank, size in enumerate(sizes)
    }


def column(spans: tuple[Span, ...], blocks: list[bytearray], nbytes: int) -> bytearray:
    found = bytearray(nbytes)
    for span in spans:
        found[span.into : span.into + span.nbytes] = blocks[span.rank][
            span.at : span.at + span.nbytes
        ]
    return found


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3 * SUM_BYTES), min_size=1, max_size=3),
    grown=st.lists(st.integers(-5, 5000), min_size=3, max_size=3),
    flips=st.lists(st.floats(0, 1, exclude_max=True), max_size=3),
    k=st.integers(1, 2),
)
def test_adding_what_changed_turns_the_old_column_into_the_new(
    sizes: list[int], grown: list[int], flips: list[float], k: int
) -> None:
    old = [bytearray(np.random.default_rng(rank).bytes(size)) for rank, size in enumerate(sizes)]
    new = []
    for rank, block in enumerate(old):
        size = max(1, len(block) + (grown[rank] if rank == 0 else 0))
        fresh = bytearray(block[:size]) + bytearray(b"\7" * (size - len(block)))
        for where in flips:
            fresh[int(where * size)] ^= 1
        new.append(fresh)
    names = dict.fromkeys(["a", "b", "c"], "tcp://x")
    world = make_world(names, rank_nodes=["a"] * len(sizes), parity=3 - k)
    now = Geometry(world, entries([len(block) for block in new]))
    before = Geometry(world, entries([len(block) for block in old]))
    same = {
        r: same_runs(n, sums_of(n), o, sums_of(o))
        for r, (n, o) in enumerate(zip(new, old, strict=True))
    }
    for stripe in range(now.n):
        for number in range(now.columns(stripe)):
            filled = now.filled_bytes(stripe, number), before.filled_bytes(stripe, number)
            length = max(filled)
            spans = now.spans(stripe, number, 0, length)
            earlier = before.spans(stripe, number, 0, length)
            fresh, stale = column(spans, new, length), column(earlier, old, length)
            ranges = changed_ranges(spans, earlier, same, length=length)
            assert list(ranges) == sorted(ranges)
            for lo, hi in ranges:
                stale[lo:hi] = fresh[lo:hi]
            assert stale == fresh
            if new == old:
                assert ranges == ()


@given(
    pairs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=6),
    limit=st.integers(1, 20),
)
def test_batches_hold_every_byte_once_and_no_more_than_their_limit(
    pairs: list[tuple[int, int]], limit: int
) -> None:
    ranges = [(lo, lo + nbytes) for lo, nbytes in pairs]
    cut = batches(ranges, limit)
    assert [at for batch in cut for lo, hi in batch for at in range(lo, hi)] == [
        at for lo, hi in ranges for at in range(lo, hi)
    ]
    assert all(0 < sum(hi - lo for lo, hi in batch) <= limit for batch in cut)
