"""The outer step: the formula, operation by operation, and the same bits on any processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.sea.outer import SMALLEST, stepped
from holdfast.elastic.sea.settings import Nesterov

SCRIPT = """
import hashlib, numpy as np
from holdfast.elastic.sea import gossip, payload
from holdfast.elastic.sea.outer import stepped
from holdfast.elastic.sea.settings import Nesterov
rng = np.random.default_rng(7)
n = 70001
w, m = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
digest = hashlib.blake2b()
for bits in (4, 8, 16, 32):
    parts = [
        (payload.encode((rng.standard_normal(n) * 10.0**-k).astype(np.float32), bits), 5 + k)
        for k in range(3)
    ]
    gradient = payload.mean(parts, whole=20, bits=bits, n=n)
    stepped(w, m, gradient, Nesterov(lr=0.7, momentum=0.9))
    met = gossip.split(gossip.encode(gradient, w, bits), bits)
    apart = payload.mean([(met[1], 1)], whole=1, bits=gossip.WEIGHT_BITS, n=n) - w
    gossip.met(w, m, gradient, apart, Nesterov(lr=0.7, momentum=0.9))
    for data in (*(part for part, _ in parts), gradient, w, m):
        digest.update(bytes(data))
print(digest.hexdigest())
"""


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 200), st.integers(0, 1 << 30), st.floats(0.01, 2), st.floats(0, 0.99))
def test_a_step_is_the_formula_with_each_operation_rounded(
    n: int, seed: int, lr: float, momentum: float
) -> None:
    rng = np.random.default_rng(seed)
    w, m, g = (rng.standard_normal(n).astype(np.float32) for _ in range(3))
    before = g.copy()
    right_m = np.array([_sum(_f(a * _f(momentum)) + b) for a, b in zip(m, g, strict=True)], "f4")
    ahead = [_sum(_f(a * _f(momentum)) + b) for a, b in zip(right_m, g, strict=True)]
    right_w = np.array([_sum(a - _f(b * _f(lr))) for a, b in zip(w, ahead, strict=True)], "f4")
    stepped(w, m, g, Nesterov(lr, momentum))
    assert (w.tobytes(), m.tobytes()) == (right_w.tobytes(), right_m.tobytes())
    assert g.tobytes() == before.tobytes()


def _f(value: Any) -> np.float32:
    return np.float32(value)


def _sum(value: Any) -> np.float32:
    return _f(value) if abs(value) >= SMALLEST else _f(0)


@contextmanager
def flushing(*, flushes: bool) -> Iterator[None]:
    """Let this thread take denormal numbers for zero, or not."""
    assert torch.set_flush_denormal(flushes)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


TINY = st.floats(-140, -95).map(lambda e: 2.0**e) | st.sampled_from([0.0, 2.0**-126, 2.0**-100])
NUMBERS = st.tuples(TINY | st.floats(-10, 0).map(lambda e: 2.0**e), st.sampled_from([1, -1]))


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=40),
    st.sampled_from([0.7, 1e-20, 100.0]),
    st.sampled_from([0.0, 1e-30, 0.5, 0.9999]),
)
def test_a_thread_that_takes_denormal_numbers_for_zero_finds_the_same_bits(
    numbers: list[tuple[tuple[float, int], ...]],
    lr: float,
    momentum: float,
) -> None:
    rows = np.array([[size * sign for size, sign in row] for row in numbers], np.float32).T
    found = []
    for flushes in (False, True):
        w, m, g = (row.copy() for row in rows)
        with flushing(flushes=flushes):
            for _ in range(3):
                stepped(w, m, g, Nesterov(lr, momentum))
        found.append((w.tobytes(), m.tobytes()))
    assert found[0] == found[1]


def test_a_long_vector_has_the_bits_of_its_parts() -> None:
    n = (1 << 16) * 2 + 77
    rng = np.random.default_rng(1)
    w, m, g = (rng.standard_normal(n).astype(np.float32) for _ in range(3))
    parts = [(w[at].copy(), m[at].copy()) for at in (slice(0, 1000), slice(1000, n))]
    stepped(w, m, g, Nesterov())
    stepped(*parts[0], g[:1000], Nesterov())
    stepped(*parts[1], g[1000:], Nesterov())
    for k in range(2):
        joined = np.concatenate([part[k] for part in parts])
        assert joined.tobytes() == (w, m)[k].tobytes()


@pytest.mark.slow
def test_merges_have_the_same_bits_with_any_instructions_of_the_processor() -> None:
    features = (
        "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL X86_V3 X86_V4"
    )
    found = set()
    for extra in (
        {},
        {"NPY_DISABLE_CPU_FEATURES": features, "ATEN_CPU_CAPABILITY": "default"},
        {"NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512_SKX X86_V4", "ATEN_CPU_CAPABILITY": "avx2"},
    ):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT],
            env={**os.environ, **extra},
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        found.add(run.stdout)
    assert len(found) == 1
