"""Copying only what differs, with and without the compiled part."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ckpt.native import isal, piece_copy, refresh, streaming
from holdfast.ckpt.native.refresh import Fingerprints, RefreshMode, refresh_runs

SIZES = [1, 16, 4095, 4096, 40_000, 131_072]


@pytest.fixture(params=["compiled", "by a library", "run by run"], autouse=True, scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "run by run":
            patch.setattr(refresh, "kernel", lambda: None)
            patch.setattr(streaming, "kernel", lambda: None)
        elif refresh.kernel() is None:
            pytest.skip("the package was installed without a compiler, or for another processor")
        elif request.param == "by a library":
            patch.setattr(piece_copy, "kernel", lambda: None)
        refresh._checksums.cache_clear()
        yield
    refresh._checksums.cache_clear()


class _Memory:
    """Runs of some sizes, one behind the other, in two arrays."""

    def __init__(self, sizes: list[int]) -> None:
        ends = np.cumsum(sizes)
        self.at, self.sizes = np.array([0, *ends[:-1]], np.uint64), np.array(sizes, np.uint64)
        self.source = np.frombuffer(random.Random(1).randbytes(int(ends[-1])), np.uint8).copy()
        self.target = np.zeros(int(ends[-1]), np.uint8)
        self.prints = Fingerprints.unknown(len(sizes))

    def refresh(self, modes: list[RefreshMode]) -> list[bool]:
        sources = self.at + np.uint64(self.source.ctypes.data)
        targets = self.at + np.uint64(self.target.ctypes.data)
        found, written = refresh_runs((sources, targets, self.sizes), self.prints, np.array(modes))
        self.prints.put(slice(None), found)
        return [bool(each) for each in written]

    def run(self, i: int) -> slice:
        return slice(int(self.at[i]), int(self.at[i] + self.sizes[i]))


@given(data=st.data())
def test_after_each_refresh_the_copy_is_the_source(data: st.DataObject) -> None:
    memory = _Memory(data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=6)))
    count = len(memory.sizes)
    for _ in range(data.draw(st.integers(1, 4))):
        known = memory.prints.known.copy()
        changed = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        for i in range(count):
            if changed[i]:
                memory.source[memory.run(i).stop - 1] ^= 1
        modes = data.draw(st.lists(st.sampled_from(RefreshMode), min_size=count, max_size=count))
        written = memory.refresh(modes)
        assert (memory.target == memory.source).all()
        for i, mode in enumerate(modes):
            spared = mode is RefreshMode.COMPARE and bool(known[i]) and not changed[i]
            assert written[i] is not spared
            assert bool(memory.prints.known[i]) is (mode is not RefreshMode.COPY)
            part = bytes(memory.source[memory.run(i)])
            assert int(memory.prints.sums[i]) == isal.crc32c(part)
            if memory.prints.known[i]:
                wide = isal.crc64_at(int(memory.at[i]) + memory.source.ctypes.data, len(part))
                assert int(memory.prints.wide[i]) == wide


def _invisible(nbytes: int) -> bytes:
    """Return a change of ``nbytes`` bytes that their CRC32C does not show.

    The effects of single bits are 32 bits wide, so some of 33 of them cancel out.
    """
    plain = isal.crc32c(bytes(nbytes))
    basis: dict[int, tuple[int, int]] = {}
    for bit in range(33):
        change = 1 << bit
        effect = isal.crc32c(change.to_bytes(nbytes, "little")) ^ plain
        while effect and effect.bit_length() in basis:
            other, mixed = basis[effect.bit_length()]
            effect, change = effect ^ other, change ^ mixed
        if not effect:
            return change.to_bytes(nbytes, "little")
        basis[effect.bit_length()] = effect, change
    raise AssertionError("33 numbers of 32 bits are independent")


def test_a_run_with_the_same_crc32c_and_other_bytes_is_written() -> None:
    memory = _Memory([64])
    memory.refresh([RefreshMode.READ])
    before = int(memory.prints.sums[0])
    memory.source ^= np.frombuffer(_invisible(64), np.uint8)
    assert isal.crc32c(bytes(memory.source)) == before
    assert memory.refresh([RefreshMode.COMPARE]) == [True]
    assert (memory.target == memory.source).all()
    assert int(memory.prints.sums[0]) == before
