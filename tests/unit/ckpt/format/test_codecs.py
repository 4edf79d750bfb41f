"""Codecs restore their input, and never trust the sizes claimed in compressed data."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.errors import ArgumentError, CorruptError, StateError
from holdfast.ckpt.format import codecs
from holdfast.ckpt.format.codecs import Codec

SPELLINGS = (
    "zstd",
    "zstd:1",
    "zstd:22",
    "blosc-lz4",
    "blosc-lz4hc:9",
    "blosc-blosclz:1",
    "blosc-zstd:5",
    "blosc-zlib:0",
)


def codec_of(spelling: str, itemsize: int = 4) -> Codec:
    codec = codecs.parse(spelling, itemsize=itemsize)
    assert codec is not None
    return codec


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_what_was_compressed_comes_back(spelling: str, itemsize: int) -> None:
    codec = codec_of(spelling, itemsize)
    rng = np.random.default_rng(itemsize)
    for data in (b"\0", b"x" * 1000, rng.bytes(3001), bytes(1 << 20)):
        small = codecs.encode(codec, data)
        assert bytes(codecs.decode(codec, small, nbytes=len(data))) == data
        room = memoryview(bytearray(len(data)))
        codecs.decode(codec, small, nbytes=len(data), into=room)
        assert bytes(room) == data


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("off_by", [-1000, -1, 1, 1 << 40])
def test_another_size_than_asked_is_refused(spelling: str, off_by: int) -> None:
    codec = codec_of(spelling)
    small = codecs.encode(codec, bytes(1000))
    with pytest.raises(CorruptError, match="declares 1000 bytes"):
        codecs.decode(codec, small, nbytes=1000 + off_by)


@pytest.mark.parametrize("claim", [1 << 31, (1 << 32) - 1])
def test_no_room_is_made_for_a_claim(claim: int) -> None:
    codec = codec_of("blosc-lz4")
    bad = bytearray(codecs.encode(codec, bytes(1000)))
    bad[4:8] = claim.to_bytes(4, "little")
    frame = b"\x28\xb5\x2f\xfd\xe0" + (1 << 45).to_bytes(8, "little") + b"\x01\x00\x00"
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="cannot be"):
            codecs.decode(codec, bad, nbytes=claim)
        with pytest.raises(CorruptError, match="cannot be"):
            codecs.decode(codec_of("zstd"), frame, nbytes=1 << 45)
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_the_best_ratio_there_is_is_allowed() -> None:
    data = bytes(64 << 20)
    for spelling in ("zstd:9", "blosc-zstd:5"):
        codec = codec_of(spelling)
        small = codecs.encode(codec, data)
        assert len(data) <= len(small) * codecs.MAX_RATIO
        assert codecs.decode(codec, small, nbytes=len(data)).nbytes == len(data)


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(SPELLINGS), st.data())
def test_damaged_data_is_an_error_or_the_right_size(spelling: str, data: st.DataObject) -> None:
    codec = codec_of(spelling)
    good = codecs.encode(codec, np.arange(700, dtype="<i2").tobytes())
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    del bad[data.draw(st.integers(1, len(bad))) :]
    with contextlib.suppress(CorruptError):
        assert codecs.decode(codec, bad, nbytes=1400).nbytes == 1400


@given(st.sampled_from(SPELLINGS), st.binary(max_size=60))
def test_anything_else_is_refused(spelling: str, junk: bytes) -> None:
    with pytest.raises(CorruptError):
        codecs.decode(codec_of(spelling), junk, nbytes=1 << 20)


@pytest.mark.parametrize(
    "spelling", ["", "gzip", "zstd:0", "zstd:23", "blosc", "blosc-gzip", "blosc-lz4:10", "zstd:x"]
)
def test_a_codec_that_is_not_there_is_refused_with_a_list(spelling: str) -> None:
    with pytest.raises(ArgumentError, match="use none, zstd"):
        codecs.check({"*": spelling})


def test_the_first_rule_that_fits_counts() -> None:
    rules = {"model.embed*": "none", "model.*": "zstd:7", "optimizer.*": "blosc-lz4"}
    assert codecs.choose(rules, "model.embed.weight", itemsize=4) is None
    assert codecs.choose(rules, "model.layer", itemsize=4) == Codec(name="zstd", level=7)
    found = codecs.choose(rules, "optimizer.m", itemsize=2)
    assert found == Codec(name="blosc", cname="lz4", level=5, typesize=2)
    assert codecs.choose(rules, "other", itemsize=4) is None


def test_more_than_a_codec_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_MOST_BYTES", 100)
    with pytest.raises(StateError, match="101 bytes cannot be compressed by zstd:3"):
        codecs.encode(codec_of("zstd"), bytes(101))
