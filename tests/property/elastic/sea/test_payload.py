"""Payloads: bounded errors, exact and orderless means, ranges, pieces."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.errors import SeaError
from holdfast.elastic.sea import payload

BITS = (4, 8, 16, 32)
SIZES = st.one_of(st.integers(0, 3), st.integers(250, 260), st.integers(500, 1600))
Floats = np.ndarray[Any, np.dtype[np.float32]]


@st.composite
def numbers(draw: st.DrawFn, size: int | None = None) -> Floats:
    """Draw numbers of one size or of many, some of them zero or the smallest of their kind."""
    n = draw(SIZES) if size is None else size
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    spread = draw(st.sampled_from((0.0, 1.0, 5.0, 20.0)))
    scale = 2.0 ** draw(st.integers(-100, 80))
    found = rng.standard_normal(n) * np.exp(rng.standard_normal(n).clip(-2, 2) * spread / 2) * scale
    found *= rng.random(n) >= draw(st.sampled_from((0.0, 0.5, 1.0)))
    return found.astype(np.float32)


def padded(values: Floats) -> Floats:
    return np.pad(values, (0, -len(values) % payload.BLOCK)).reshape(-1, payload.BLOCK)


@settings(max_examples=examples(150), deadline=None)
@given(numbers(), st.sampled_from(BITS))
def test_an_error_is_at_most_half_of_the_step_of_a_block(values: Floats, bits: int) -> None:
    data = payload.encode(values, bits)
    found = payload.value(data, bits, len(values))
    assert len(data) == payload.nbytes(len(values), bits)
    peak = np.maximum(np.abs(padded(values)).max(axis=1, initial=0), 2.0**-90)
    coarse = 2 if bits == 32 else 1 + 2**-7  # the scale has 0 or 8 binary digits
    step = peak.astype(np.float64) / (2 ** (bits - 1) - 1) * coarse
    error = np.abs(padded(found).astype(np.float64) - padded(values))
    assert np.all(error <= step[:, None] * 0.5001)


@settings(max_examples=examples(60), deadline=None)
@given(numbers(), st.sampled_from(BITS))
def test_encoding_a_value_again_gives_its_bytes(values: Floats, bits: int) -> None:
    """So an island that sends what it just received adds no further error, but for one scale."""
    once = payload.value(payload.encode(values, bits), bits, len(values))
    twice = payload.value(payload.encode(once, bits), bits, len(values))
    assert np.allclose(once, twice, rtol=2**-6, atol=0) or bits == 4


@settings(max_examples=examples(100), deadline=None)
@given(numbers(), st.sampled_from(BITS), st.integers(1, 9))
def test_pieces_joined_are_the_payload_of_the_whole(values: Floats, bits: int, parts: int) -> None:
    cuts = payload.pieces(len(values), parts)
    assert len(cuts) == parts
    assert [each for cut in cuts for each in range(len(values))[cut]] == list(range(len(values)))
    whole = payload.encode(values, bits)
    assert payload.join([payload.encode(values[cut], bits) for cut in cuts]) == whole


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_a_range_of_blocks_has_the_bits_of_the_whole(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from(BITS))
    values = data.draw(numbers())
    n = len(values)
    parts = [(payload.encode(values * f, bits), w) for f, w in ((1, 3), (0.5, 4))]
    rows = payload.rows_of(n)
    first = data.draw(st.integers(0, rows))
    at = slice(first, data.draw(st.integers(first, rows)))
    inside = slice(at.start * payload.BLOCK, at.stop * payload.BLOCK)
    width = payload.row_bytes(bits)
    own = [(part[at.start * width : at.stop * width], w) for part, w in parts]
    count = len(values[inside])
    for found, whole in (
        (payload.value(parts[0][0], bits, n, at), payload.value(parts[0][0], bits, n)),
        (payload.value(own[0][0], bits, count), payload.value(parts[0][0], bits, n)),
        (
            payload.mean(parts, whole=9, bits=bits, n=n, rows=at),
            payload.mean(parts, whole=9, bits=bits, n=n),
        ),
        (
            payload.mean(own, whole=9, bits=bits, n=count),
            payload.mean(parts, whole=9, bits=bits, n=n),
        ),
    ):
        assert found.tobytes() == whole[inside].tobytes()


@st.composite
def contributions(draw: st.DrawFn) -> tuple[int, int, list[tuple[bytes, int]], int]:
    """Draw bits, a size, payloads with weights, and the weight of the whole sea."""
    bits, n = draw(st.sampled_from(BITS)), draw(SIZES)
    heavy = draw(st.sampled_from((9, 1 << 10, 1 << 26)))
    parts = [
        (payload.encode(draw(numbers(n)), bits), draw(st.integers(1, heavy)))
        for _ in range(draw(st.integers(1, 5)))
    ]
    weight = sum(w for _, w in parts)
    return bits, n, parts, weight + draw(st.sampled_from((0, 1, weight)))


@settings(max_examples=examples(150), deadline=None)
@given(contributions(), st.randoms(use_true_random=False))
def test_a_mean_has_the_same_bits_in_any_order(
    case: tuple[int, int, list[tuple[bytes, int]], int], order: Any
) -> None:
    bits, n, parts, whole = case
    found = payload.mean(parts, whole=whole, bits=bits, n=n)
    order.shuffle(parts)
    again = payload.mean([(memoryview(d), w) for d, w in parts], whole=whole, bits=bits, n=n)
    assert found.tobytes() == again.tobytes()


def exact(parts: list[tuple[bytes, int]], whole: int, bits: int, at: int) -> Fraction:
    """Return the mean at one place by fractions, from the bytes alone."""
    total, (row, column) = Fraction(0), divmod(at, payload.BLOCK)
    for data, weight in parts:
        line = data[row * payload.row_bytes(bits) :][: payload.row_bytes(bits)]
        e = int.from_bytes(line[1:2], "little", signed=True)
        if bits == 4:
            nibble = line[2 + column // 2] >> 4 * (column % 2) & 15
            q = nibble - 16 * (nibble > 7)
        else:
            width = bits // 8
            q = int.from_bytes(line[2 + column * width :][:width], "little", signed=True)
        total += Fraction(q * (line[0] + 1) * weight) * Fraction(2) ** e
    return total / whole


@settings(max_examples=examples(150), deadline=None)
@given(contributions(), st.integers(0, 1 << 20))
def test_a_mean_is_the_exact_one_rounded(
    case: tuple[int, int, list[tuple[bytes, int]], int], place: int
) -> None:
    bits, n, parts, whole = case
    if n == 0:
        return
    at = place % n
    found = float(payload.mean(parts, whole=whole, bits=bits, n=n)[at])
    right = exact(parts, whole, bits, at)
    scales = [data[at // payload.BLOCK * payload.row_bytes(bits) :][:2] for data, _ in parts]
    e = [int.from_bytes(s[1:], "little", signed=True) for s in scales]
    room = 62 - bits - (0 if bits == 32 else 8) - whole.bit_length()
    coarse = Fraction(2) ** (max(e) - room) if max(e) - min(e) > room else 0
    assert (
        abs(Fraction(found) - right)
        <= abs(right) * Fraction(1, 1 << 24) + coarse + Fraction(2) ** -149
    )


@settings(max_examples=examples(60), deadline=None)
@given(contributions())
def test_who_is_absent_counts_as_zero(
    case: tuple[int, int, list[tuple[bytes, int]], int],
) -> None:
    """So a mean is never renormalised over those present."""
    bits, n, parts, whole = case
    zero = payload.encode(np.zeros(n, np.float32), bits)
    rest = whole - sum(w for _, w in parts)
    alone = payload.mean(parts, whole=whole, bits=bits, n=n)
    together = payload.mean([*parts, *[(zero, rest)] * (rest > 0)], whole=whole, bits=bits, n=n)
    assert np.allclose(
        alone, together, rtol=2**-22, atol=float(np.abs(alone).max(initial=0)) * 1e-6
    )


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e36, -2e36])
@pytest.mark.parametrize("at", [3, 256, 299])
def test_numbers_that_are_not_finite_are_refused(bits: int, bad: float, at: int) -> None:
    values = np.ones(300, np.float32)
    values[at] = bad
    with pytest.raises(SeaError, match="must be finite"):
        payload.encode(values, bits)


def test_a_tensor_without_dimensions_and_an_empty_one_have_payloads() -> None:
    scalar = np.array(2.5, np.float32)
    assert payload.value(payload.encode(scalar, 16), 16, 1) == pytest.approx([2.5], rel=1e-4)
    assert payload.encode(np.zeros((0, 7), np.float32), 4) == b""
    assert payload.mean([(b"", 1)], whole=1, bits=4, n=0).shape == (0,)
    assert payload.mean([], whole=1, bits=4, n=5).tolist() == [0] * 5


@pytest.mark.parametrize(
    ("weights", "whole", "message"),
    [
        ([0], 3, "weight 0"),
        ([2, 2], 3, "weigh 4 together and the sea 3"),
        ([1], 1 << 31, "below"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: list[int], whole: int, message: str) -> None:
    data = payload.encode(np.ones(3, np.float32), 8)
    with pytest.raises(SeaError, match=message):
        payload.mean([(data, w) for w in weights], whole=whole, bits=8, n=3)


def test_a_payload_of_another_size_is_refused() -> None:
    data = payload.encode(np.ones(300, np.float32), 4)
    with pytest.raises(SeaError, match="260 bytes where 700 numbers of 4 bits need 390"):
        payload.value(data, 4, 700)
