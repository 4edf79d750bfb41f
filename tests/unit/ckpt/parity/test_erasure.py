"""The erasure code against a naive GF(256) implementation, and any k of n fragments."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from galois import TABLE
from pyeclib.ec_iface import ECDriver

from holdfast.ckpt.native import isal, mixed, xored
from holdfast.ckpt.native.isal import cauchy_matrix
from holdfast.ckpt.parity import combining
from holdfast.ckpt.parity.erasure import ErasureCode, codec_named

LENGTH = 300


@pytest.fixture(params=["as here", "without compiled passes"], autouse=True)
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with the compiled passes of this processor, and once more without any."""
    if request.param != "as here":
        monkeypatch.setattr(xored, "kernel", lambda: None)
        monkeypatch.setattr(mixed, "kernel", lambda: None)


def encode(k: int, m: int) -> tuple[list[bytes], list[bytearray]]:
    rng = np.random.default_rng([k, m])
    data = [rng.bytes(LENGTH) for _ in range(k)]
    codec = ErasureCode(k, m)
    rows = [bytearray(LENGTH) for _ in range(m)]
    for column in reversed(range(k)):  # the order of contributions does not matter
        for row in range(m):
            codec.encode_update(row, column, data[column], rows[row])
    return data, rows


@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 3), (4, 1), (2, 2), (3, 3), (5, 2)])
def test_parity_is_what_the_textbook_says(k: int, m: int) -> None:
    data, rows = encode(k, m)
    plain = m == 1 or k == 1
    matrix = np.ones((m, k), dtype=np.uint8) if plain else cauchy_matrix(k + m, k)[k:]
    for row in range(m):
        expected = np.zeros(LENGTH, dtype=np.uint8)
        for column in range(k):
            expected ^= TABLE[matrix[row, column], np.frombuffer(data[column], dtype=np.uint8)]
        assert bytes(rows[row]) == expected.tobytes()


@pytest.mark.parametrize(("k", "m"), [(1, 1), (4, 1), (2, 2), (3, 3), (1, 4)])
def test_any_k_fragments_give_every_column_back(k: int, m: int) -> None:
    data, rows = encode(k, m)
    fragments = dict(enumerate([*data, *map(bytes, rows)]))
    for have in combinations(range(k + m), k):
        for lost in set(range(k)) - set(have):
            into = bytearray(LENGTH)
            ErasureCode(k, m).decode(lost, {number: fragments[number] for number in have}, into)
            assert bytes(into) == data[lost]


@pytest.mark.parametrize(("k", "m"), [(1, 2), (4, 1), (2, 2), (3, 3), (5, 2)])
def test_all_rows_in_one_pass_are_what_updates_make_of_them(k: int, m: int) -> None:
    data, rows = encode(k, m)
    made = {row: bytearray(b"\xff" * LENGTH) for row in range(m)}  # overwritten
    sums = ErasureCode(k, m).encode(data, made)
    assert list(made.values()) == rows
    assert sums == {row: isal.crc32c(made[row]) for row in range(m)}
    if k == 1:
        assert all(row == data[0] for row in rows)
    last = {m - 1: bytearray(LENGTH)}
    ErasureCode(k, m).encode(data, last)
    assert last[m - 1] == rows[-1]


def test_short_columns_stand_for_zeros_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "PIECE_BYTES", 64)  # as if the rows were long
    codec, length = ErasureCode(3, 2), 200
    data = [bytes(range(1, 1 + size)) for size in (150, 0, 70)]
    full = [each + bytes(length - len(each)) for each in data]
    short = {row: bytearray(b"\xff" * length) for row in (0, 1)}
    whole = {row: bytearray(length) for row in (0, 1)}
    codec.encode(data, short)
    codec.encode(full, whole)
    assert short == whole
    updated = bytearray(length)
    for column in range(3):
        codec.encode_update(1, column, full[column], updated)
    assert updated == whole[1]
    lost = bytearray(length)
    cuts = (0, 64, 64, 65, 150, 199)
    sums = codec.decode(0, {1: b"", 2: data[2], 4: bytes(whole[1])}, lost, cuts=cuts)
    assert bytes(lost) == full[0]
    parts = [full[0][lo:hi] for lo, hi in pairwise((0, *cuts, length))]
    assert sums.tolist() == [isal.crc32c(part) for part in parts]


@pytest.mark.parametrize(
    ("k", "m", "kind"),
    [(4, 2, "isa_l_rs_cauchy"), (5, 3, "isa_l_rs_cauchy"), (6, 1, "isa_l_rs_vand")],
)
def test_pyeclib_computes_the_same_rows(k: int, m: int, kind: str) -> None:
    header, length = 80, 4096  # of liberasurecode's fragments
    rng = np.random.default_rng([k, m])
    data = [rng.bytes(length) for _ in range(k)]
    fragments = ECDriver(k=k, m=m, ec_type=kind).encode(b"".join(data))
    assert [fragment[header:] for fragment in fragments[:k]] == data
    rows = {row: bytearray(length) for row in range(m)}
    ErasureCode(k, m).encode(data, rows)
    assert [fragment[header:] for fragment in fragments[k:]] == list(rows.values())


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="needs all 2 columns, got 1"):
        ErasureCode(2, 1).encode([b"ab"], {0: bytearray(2)})
    with pytest.raises(ValueError, match=r"\[2, 3\] bytes do not fit into \[2\]"):
        ErasureCode(2, 1).encode([b"ab", b"abc"], {0: bytearray(2)})
    with pytest.raises(ValueError, match=r"do not fit into \[2, 3\]"):
        ErasureCode(2, 2).encode([b"ab", b"ab"], {0: bytearray(2), 1: bytearray(3)})


def test_codecs_are_known_by_name() -> None:
    made = codec_named()(3, 1)
    assert isinstance(made, ErasureCode)
    assert codec_named("isal-cauchy-1")(3, 1) is made
    with pytest.raises(ValueError, match="no erasure codec 'raid'"):
        codec_named("raid")


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no code for 0 data"):
        ErasureCode(0, 1)
    with pytest.raises(ValueError, match="needs 2 different fragments"):
        ErasureCode(2, 1).coefficients(0, (1, 1))
