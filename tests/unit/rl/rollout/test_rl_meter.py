"""A rollout worker reports its samples, but not at every token."""

from __future__ import annotations

import pytest

from holdfast.adapters.rl.rollout import meter
from holdfast.adapters.rl.rollout.meter import Meter
from holdfast.elastic.events import Event, TokensSampled, of_kind


def test_totals_are_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, events = [100.0], list[Event]()
    monkeypatch.setattr(meter.time, "monotonic", lambda: now[0])

    counted = Meter()
    for _ in range(3):
        counted.tokens += 10
        counted.tell(events.append, logged_bytes=60)
    now[0] += meter.EVERY_S
    counted.tell(events.append, logged_bytes=70)
    sampled = of_kind(events, TokensSampled)
    assert [(each.tokens, each.logged_bytes) for each in sampled] == [(10, 60), (30, 70)]


def test_what_is_timed_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr(meter.time, "perf_counter", lambda: next(times))
    counted = Meter()
    with counted.sampling():
        pass
    with counted.logging():
        pass
    assert (counted.sampling_s, counted.logging_s) == (2.0, 0.5)
