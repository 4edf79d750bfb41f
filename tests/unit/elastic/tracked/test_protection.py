"""The run learns its protection in the background, with few queries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.ckpt.errors import PeerError
from holdfast.elastic.tracked import protection
from holdfast.elastic.tracked.protection import ProtectionWatch

DEADLINE_S = 10.0


class Sidecar:
    """Protects what the test says, when it says so."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.protected, self.requests, self.fails = -1, 0, 0
        self.unprotected: dict[str, str] = {}

    def status(self) -> dict[str, Any]:
        return {"unprotected": dict(self.unprotected)}

    def protect(self, step: int) -> None:
        with self.changed:
            self.protected = step
            self.changed.notify_all()

    def protected_step(self, *, generation: int, at_least: int, timeout_s: float) -> int:
        assert generation == 4
        with self.changed:
            self.requests += 1
            if self.fails:
                self.fails -= 1
                raise PeerError("no answer")
            self.changed.wait_for(lambda: self.protected >= at_least, timeout_s)
            return self.protected


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> Sidecar:
    monkeypatch.setattr(protection, "EVERY_S", 0.05)
    return Sidecar()


@pytest.fixture
def reports() -> list[tuple[int, float]]:
    return []


@pytest.fixture
def reasons() -> list[tuple[int, str]]:
    return []


@pytest.fixture
def watch(
    sidecar: Any, reports: list[tuple[int, float]], reasons: list[tuple[int, str]]
) -> Iterator[ProtectionWatch]:
    watch = ProtectionWatch(
        sidecar,
        generation=4,
        restored=7,
        tell=lambda step, s: reports.append((step, s)),
        tell_why=lambda step, why: reasons.append((step, why)),
    )
    yield watch
    watch.close()


def test_what_was_restored_counts_until_something_newer_is_protected(
    watch: ProtectionWatch, sidecar: Sidecar, reports: list[tuple[int, float]]
) -> None:
    assert watch.now().step == 7
    assert watch.now().protected_after_s is None
    watch.taken(8)
    until(lambda: sidecar.requests > 0)
    assert watch.now().step == 7
    age_s = watch.now().age_s
    sidecar.protect(8)
    until(lambda: watch.now().step == 8)
    assert watch.now().age_s < age_s + DEADLINE_S
    until(lambda: [step for step, _ in reports] == [8])
    assert watch.now().protected_after_s == reports[0][1] > 0


def test_the_sidecar_is_asked_seldom_however_fast_the_steps_are(
    watch: ProtectionWatch, sidecar: Sidecar
) -> None:
    sidecar.protect(10_000)
    began_s = time.monotonic()
    for step in range(2_000):
        watch.taken(step + 8)
        time.sleep(0.0001)
    assert sidecar.requests <= 2 + (time.monotonic() - began_s) / 0.05


def test_a_sidecar_that_does_not_answer_is_asked_again(
    watch: ProtectionWatch, sidecar: Sidecar
) -> None:
    sidecar.fails = 3
    sidecar.protect(8)
    watch.taken(8)
    until(lambda: watch.now().step == 8)
    assert sidecar.requests == 4


def test_nothing_is_asked_where_nothing_was_taken(watch: ProtectionWatch, sidecar: Sidecar) -> None:
    watch.close()
    watch._thread.join(DEADLINE_S)
    assert not watch._thread.is_alive()
    assert sidecar.requests == 0


def test_why_a_step_is_not_protected_is_told_once(
    watch: ProtectionWatch,
    sidecar: Sidecar,
    reasons: list[tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protection, "_WAIT_S", 0.05)
    sidecar.unprotected = {"3/7": "of an older generation", "4/8": "no room"}
    watch.taken(8)
    until(lambda: sidecar.requests >= 4)
    assert reasons == [(8, "no room")]
    sidecar.unprotected = {"4/8": "bytes changed"}
    until(lambda: len(reasons) == 2)
    sidecar.unprotected = {}
    sidecar.protect(8)
    until(lambda: watch.now().step == 8)
    assert reasons[1:] == [(8, "bytes changed")]
