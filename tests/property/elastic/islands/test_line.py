"""The pace and the figures of a line, on a clock that only waits move."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.sidecar.persist.bandwidth import BURST_S
from holdfast.elastic.islands.haul.line import LEAST_PIECE_BYTES, MOST_PIECE_BYTES, PacedLine


class Clock:
    """Time that passes while a line waits."""

    def __init__(self, line_of: int) -> None:
        self.now_s = 0.0
        self.line = PacedLine(line_of, clock=lambda: self.now_s)
        patch.object(self.line._closing, "wait", self.wait).start()

    def wait(self, timeout: float) -> bool:
        self.now_s += timeout
        return self.line._closing.is_set()


@given(st.integers(40_000, 10**9), st.lists(st.integers(0, 5_000_000), min_size=1, max_size=8))
@settings(max_examples=examples(60))
def test_payloads_take_as_long_as_the_declared_rate_says(rate: int, sizes: list[int]) -> None:
    clock = Clock(rate)
    for nbytes in sizes:
        with clock.line.transfer() as line:
            moved = b"".join(bytes(piece) for piece in line.paced(b"x" * nbytes))
        assert len(moved) == nbytes
    whole = sum(sizes)
    assert clock.now_s == pytest.approx(max(0.0, whole / rate - BURST_S), abs=1e-6, rel=1e-6)
    assert clock.line.nbytes == whole
    if clock.now_s > 20 * BURST_S:
        assert clock.line.measured_per_s == pytest.approx(rate, rel=0.06)


@given(st.integers(40_000, 10**10), st.integers(0, 30 << 20))
@settings(max_examples=examples(60))
def test_pieces_and_parts_are_moved_in_a_moment(rate: int, nbytes: int) -> None:
    line = PacedLine(rate)
    assert LEAST_PIECE_BYTES <= line.piece_bytes <= MOST_PIECE_BYTES
    assert line.piece_bytes <= max(LEAST_PIECE_BYTES, rate / 2)
    parts = line.paced(bytes(nbytes))
    assert 5 << 20 <= parts.part_bytes(32 << 20) <= max(5 << 20, rate * 30)
    assert PacedLine().paced(b"").part_bytes(32 << 20) == 32 << 20


def test_without_a_rate_nobody_waits_and_bytes_are_counted() -> None:
    clock = Clock(0)
    with clock.line.transfer() as line:
        line.pay(3 << 20)
        clock.now_s += 2.0
        assert line.measured_per_s == (3 << 20) / 2
    assert (clock.line.nbytes, clock.line.measured_per_s) == (3 << 20, (3 << 20) / 2)


def test_old_transfers_count_less_than_new_ones() -> None:
    clock = Clock(0)
    for per_s in (1000, 10):
        for _ in range(300):
            with clock.line.transfer() as line:
                line.pay(per_s)
                clock.now_s += 1.0
    assert clock.line.measured_per_s < 100


def test_transfers_of_a_closed_line_end_at_their_next_piece() -> None:
    line = PacedLine()
    line.close()
    with pytest.raises(StoreError, match="not needed any more"):
        line.pay(1)
    line.open()
    line.pay(1)
