"""The bandwidth limit holds for any pieces, and nearly all of the rate is used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ckpt.sidecar.persist.bandwidth import BURST_S, Bucket
from holdfast.ckpt.sizes import parse_rate

PIECES = st.lists(
    st.tuples(st.integers(0, 10**9), st.floats(0, 5, allow_nan=False)), min_size=1, max_size=60
)


def pass_all(pacer: Bucket, pieces: list[tuple[int, float]]) -> list[tuple[float, int]]:
    """Return when each piece went: after the wait for the one before, and some work."""
    now_s, passed = 0.0, []
    for nbytes, work_s in pieces:
        now_s += work_s
        passed.append((now_s, nbytes))
        wait_s = pacer.pay(nbytes, now_s=now_s)
        assert wait_s >= 0
        now_s += wait_s
    return passed


@given(PIECES, st.integers(1, 10**10))
def test_no_window_of_time_lets_more_through_than_the_rate(
    pieces: list[tuple[int, float]], rate: int
) -> None:
    passed = pass_all(Bucket(rate), pieces)
    for first, (begin_s, _) in enumerate(passed):
        total = 0
        for at_s, nbytes in passed[first:]:
            allowed = rate * (at_s - begin_s + BURST_S)
            assert total <= allowed * (1 + 1e-6) + 1e-3  # before this piece: one is always let go
            total += nbytes


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=60), st.integers(1, 10**10))
def test_who_is_always_ready_gets_the_whole_rate(sizes: list[int], rate: int) -> None:
    pacer, now_s = Bucket(rate), 0.0
    for nbytes in sizes:
        now_s += pacer.pay(nbytes, now_s=now_s)
    assert now_s <= sum(sizes) / rate * (1 + 1e-6)


@given(PIECES)
def test_without_a_rate_nobody_waits(pieces: list[tuple[int, float]]) -> None:
    pacer = Bucket()
    assert all(pacer.pay(nbytes, now_s=now_s) == 0 for nbytes, now_s in pieces)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("500MB/s", 500_000_000),
        ("1GiB/s", 1 << 30),
        ("1.5 GB/s", 1_500_000_000),
        (4096, 4096),
        ("20Mbit/s", 2_500_000),
        ("0.5 Gbit/s", 62_500_000),
        ("800bit/s", 100),
    ],
)
def test_a_rate_is_read_as_people_write_it(text: str | int, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "", "0", "-1MB/s", "10MB/h", 0])
def test_what_is_no_rate_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match="is not a rate; write it as in 500MB/s"):
        parse_rate(text)


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes_per_s is -1"):
        Bucket(-1)
