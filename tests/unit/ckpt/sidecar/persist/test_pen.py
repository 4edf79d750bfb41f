"""A writer yields to others, respects its bandwidth limit, and retries."""

from __future__ import annotations

import os
import threading
import time

import pytest

from holdfast.ckpt.errors import CorruptError, GivenUpError, StoreError
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.native.priority import NICE
from holdfast.ckpt.sidecar.persist import paced_writer
from holdfast.ckpt.sidecar.persist.paced_writer import PacedWriter


class Flaky:
    """Work that fails some times."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.left, self.error = failures, error or StoreError("full")
        self.attempts: list[int] = []

    def work(self) -> str:
        if self.left:
            self.left -= 1
            raise self.error
        return "done"

    def failed(self, attempt: int, error: Exception) -> None:
        assert error is self.error
        self.attempts.append(attempt)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_writer, "BACKOFF_S", (0.001, 0.002))


def test_what_fails_is_tried_again_and_told() -> None:
    flaky = Flaky(3)
    target = CheckpointTarget(root="x", retries=3)
    assert PacedWriter().persevere(flaky.work, target, failed=flaky.failed) == "done"
    assert flaky.attempts == [1, 2, 3]


def test_the_last_failure_is_raised() -> None:
    flaky = Flaky(4)
    with pytest.raises(StoreError, match="full"):
        PacedWriter().persevere(
            flaky.work, CheckpointTarget(root="x", retries=3), failed=flaky.failed
        )
    assert flaky.attempts == [1, 2, 3]


def test_damage_is_not_tried_again() -> None:
    flaky = Flaky(1, CorruptError("flipped"))
    with pytest.raises(CorruptError):
        PacedWriter().persevere(
            flaky.work, CheckpointTarget(root="x", retries=3), failed=flaky.failed
        )
    assert flaky.attempts == []


def test_closing_ends_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_writer, "BACKOFF_S", (60.0, 60.0))
    writer, flaky = PacedWriter(), Flaky(1)
    threading.Timer(0.05, writer.close).start()
    with pytest.raises(GivenUpError):
        writer.persevere(flaky.work, CheckpointTarget(root="x", retries=1), failed=flaky.failed)
    with pytest.raises(GivenUpError):
        writer.pace(1, bytes_per_s=1)


def test_the_pace_is_kept() -> None:
    writer = PacedWriter()
    began_s = time.monotonic()
    for _ in range(20):
        writer.pace(10_000, bytes_per_s=1_000_000)
    assert time.monotonic() - began_s >= 0.2 - 0.06


def test_only_the_writing_thread_yields() -> None:
    writer, found = PacedWriter(), []

    def work() -> None:
        writer.yield_to_others()
        child = threading.Thread(
            target=lambda: found.append(os.getpriority(os.PRIO_PROCESS, 0)), name="child"
        )
        child.start()
        child.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [NICE]
    assert writer.priority.startswith(f"nice {NICE}")
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < NICE
