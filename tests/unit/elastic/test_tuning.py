"""Memory is tuned while a function trains; afterwards the process is restored."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest

from holdfast.elastic import tuning


class Glibc:
    """A C library that remembers its thresholds."""

    def __init__(self) -> None:
        self.set: dict[int, int] = {}
        self.trimmed = 0

    def mallopt(self, name: int, value: int) -> int:
        self.set[name] = value
        return 1

    def malloc_trim(self, left: int) -> int:
        self.trimmed += 1
        return 1


@pytest.fixture
def glibc(monkeypatch: pytest.MonkeyPatch) -> Glibc:
    found = Glibc()
    monkeypatch.setattr(tuning, "_glibc", lambda: found)
    for name in tuning._TUNED_BY:
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_undone_at_the_end_and_at_an_error(glibc: Glibc, fails: bool) -> None:
    assert gc.get_freeze_count() == 0
    try:
        with tuning.tuned():
            assert gc.get_freeze_count() > 0
            assert glibc.set == {-1: (1 << 31) - 1, -3: 32 << 20}
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert gc.get_freeze_count() == 0
    assert glibc.set == {-1: 64 << 20, -3: 32 << 20}
    assert glibc.trimmed == 1


def test_what_the_user_froze_stays_frozen(glibc: Glibc) -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with tuning.tuned():
            pass
        assert abs(gc.get_freeze_count() - count) < 1000, "some of the frozen objects end by counts"
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("name", tuning._TUNED_BY)
def test_what_the_environment_tunes_is_left_alone(
    name: str, glibc: Glibc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "65536")
    with tuning.tuned():
        pass
    assert (glibc.set, glibc.trimmed) == ({}, 0)


_BODY = """
import sys, torch
from holdfast.elastic import tuning

def resident_mib():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * 4096 >> 20

torch.set_num_threads(1)
if not tuning.keep():
    sys.exit(77)
tensors = [torch.empty(1 << 20, dtype=torch.uint8).fill_(1) for _ in range(256)]
before = resident_mib()
del tensors
kept = resident_mib()
tuning.release()
print(before - kept, kept - resident_mib())
"""


def test_kept_memory_goes_back_to_the_kernel() -> None:
    environment: dict[str, Any] = {"PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", _BODY],
        check=False, capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("the C library has no mallopt")
    assert done.returncode == 0, done.stderr
    kept, returned = map(int, done.stdout.split())
    assert kept < 32, "what is freed stays with the process"
    assert returned > 200, "until it is released"
