"""Freed memory stays with the process: later allocations cause no page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

_BODY = """
import resource, sys
import torch
from holdfast.elastic import tuning

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def state():
    return [torch.empty(1 << 20, dtype=torch.uint8).fill_(1) for _ in range(64)]

torch.set_num_threads(1)
if not tuning.keep():
    sys.exit(77)
first = faults()
tensors = state()
before = faults()
del tensors
tensors = state()
print(before - first, faults() - before)
"""


def test_a_state_of_the_same_size_faults_nothing_in_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BODY], check=False, capture_output=True, text=True, timeout=120
    )
    if done.returncode == 77:
        pytest.skip("the C library has no mallopt")
    assert done.returncode == 0, done.stderr
    fresh, again = map(int, done.stdout.split())
    assert fresh > 64 * 200, "64 MiB are touched for the first time"
    assert again < fresh / 4
