"""Meters: sums, and quantiles of recent values."""

from __future__ import annotations

import threading

import pytest

from holdfast.ckpt.meters import RECENT, Meters


def test_counts_seconds_and_bytes_add_up_by_name() -> None:
    meters = Meters()
    meters.add("copy", 0.5, 100)
    meters.add("copy", 1.5, 200)
    meters.add("seal", 0.25)
    status = meters.status()
    assert status["copy"] == {
        "count": 2,
        "seconds": 2.0,
        "bytes": 300,
        "median_s": 1.0,
        "max_s": 1.5,
        "last_s": 1.5,
    }
    assert list(status) == ["copy", "seal"]
    assert meters.seconds("seal") == 0.25
    assert meters.seconds("persist") == 0.0


def test_the_spread_is_of_the_recent_ones() -> None:
    meters = Meters()
    meters.add("copy", 100.0)
    for _ in range(RECENT):
        meters.add("copy", 1.0)
    assert meters.status()["copy"]["max_s"] == 1.0  # type: ignore[index,call-overload]
    assert meters.seconds("copy") == 100.0 + RECENT


def test_what_fails_is_not_counted() -> None:
    meters = Meters()
    with pytest.raises(ValueError, match="x"), meters.timed("copy"):
        raise ValueError("x")
    with meters.timed("copy", 8):
        pass
    assert meters.status()["copy"]["count"] == 1  # type: ignore[index,call-overload]


def test_threads_may_share_them() -> None:
    meters = Meters()

    def add() -> None:
        for _ in range(1000):
            meters.add("copy", 0.001, 1)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meters.status()["copy"]["bytes"] == 4000  # type: ignore[index,call-overload]
