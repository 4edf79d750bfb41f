"""Copying with checksums in one pass, with and without the compiled part."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from holdfast.ckpt.native import isal, streaming
from holdfast.ckpt.native.streaming import copy_run, copy_runs, sums_of_runs

LENGTHS = [0, 1, 7, 8, 15, 16, 17, 255, 767, 768, 769, 4095, 4096, 4097, 12_287, 12_288, 12_289]


@pytest.fixture(params=["compiled", "two passes"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "two passes":
        monkeypatch.setattr(streaming, "kernel", lambda: None)
    elif streaming.kernel() is None:
        pytest.skip("the package was installed without a compiler, or for another processor")
    yield


@pytest.mark.parametrize("length", [*LENGTHS, 131_072, 1_000_003])
@pytest.mark.parametrize("shift", [0, 1, 8, 13])
def test_every_length_and_alignment_is_copied_and_checksummed(length: int, shift: int) -> None:
    source = np.frombuffer(random.Random(length).randbytes(length + shift), np.uint8)
    target = np.full(length + 64, 7, np.uint8)
    at = target.ctypes.data + 16 + (shift * 5) % 16
    crc = copy_run(source.ctypes.data + shift, at, length)
    start = at - target.ctypes.data
    assert bytes(target[start : start + length]) == bytes(source[shift:])
    assert set(target[:start].tolist()) | set(target[start + length :].tolist()) <= {7}
    assert crc == isal.crc32c(bytes(source[shift:]))


def test_runs_are_copied_each_by_itself() -> None:
    rng = random.Random(3)
    sizes = [rng.choice([*LENGTHS, 40_000]) for _ in range(200)]
    starts = np.cumsum([0, *sizes[:-1]]).astype(np.uint64)
    source = np.frombuffer(rng.randbytes(sum(sizes)), np.uint8)
    target = np.zeros(sum(sizes), np.uint8)
    order = rng.sample(range(200), 200)
    words = np.array(sizes, np.uint64)[order]
    sources = (starts + np.uint64(source.ctypes.data))[order]
    targets = (starts + np.uint64(target.ctypes.data))[order]
    found = copy_runs(sources, targets, words)
    assert (target == source).all()
    assert found.tolist() == sums_of_runs(targets, words).tolist()
    assert copy_runs(sources[:0], targets[:0], words[:0]).tolist() == []


def test_the_package_is_installed_with_the_compiled_part() -> None:
    """Everything works without it, but twice as slowly: where a compiler is, it is used."""
    assert streaming._LIBRARY.exists()
