"""Slow calls of an environment delay nothing else, are retried, and are given up with a reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.adapters.rl.environments.base import Action, Failed, Observation, Reply, ToolError
from holdfast.adapters.rl.environments.calls import ThreadedCalls
from holdfast.adapters.rl.environments.waits import Waits, quantile
from holdfast.adapters.rl.samples.trajectory import SampleId
from holdfast.elastic.errors import JobFailedError
from holdfast.elastic.events import EnvironmentWaits, Event


class Scripted:
    """An environment whose replies the test writes: one function for each call of an ordinal."""

    def __init__(self, respond: Callable[[Action], Any]) -> None:
        self._respond, self.seen = respond, list[SampleId]()

    def prompt(self, ordinal: int) -> str:
        return f"{ordinal}>"

    def respond(self, action: Action) -> Observation:
        self.seen.append(action.key)
        found: Observation = self._respond(action)
        return found


def action(ordinal: int) -> Action:
    return Action(ordinal=ordinal, sample=0, turn=1, text="", ended=True)


def gather(calls: ThreadedCalls, count: int) -> dict[SampleId, Reply]:
    """Return so many replies, each of which comes once."""
    found: dict[SampleId, Reply] = {}
    deadline_s = time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < deadline_s
        for key, reply in calls.replies(0.01):
            assert key not in found
            found[key] = reply
    return found


def test_a_slow_call_holds_up_no_other_and_only_so_many_run() -> None:
    release, most, running = threading.Event(), 0, set[int]()
    lock = threading.Lock()

    def respond(action: Action) -> Observation:
        nonlocal most
        with lock:
            running.add(action.ordinal)
            most = max(most, len(running))
        if action.ordinal == 0:
            release.wait(20)
        with lock:
            running.remove(action.ordinal)
        return Observation(text=str(action.ordinal))

    calls = ThreadedCalls(Scripted(respond), threads=3)
    for ordinal in range(20):
        calls.submit(action(ordinal))
    others = gather(calls, 19)
    assert others == {(n, 0): Observation(text=str(n)) for n in range(1, 20)}
    release.set()
    assert gather(calls, 1).keys() == {(0, 0)}
    assert most <= 3


def test_a_tool_that_fails_is_called_again_and_then_given_up() -> None:
    def respond(action: Action) -> Observation:
        if action.ordinal == 1 and environment.seen.count(action.key) == 2:
            return Observation(reward=1.0)
        raise ToolError("sandbox is full")

    environment, waits = Scripted(respond), Waits()
    calls = ThreadedCalls(environment, attempts=2, waits=waits)
    calls.submit(action(0))
    calls.submit(action(1))
    found = gather(calls, 2)
    assert found[1, 0] == Observation(reward=1.0)
    assert found[0, 0] == Failed(reason="turn 1 was given up after 2 attempts: sandbox is full")
    assert sorted(environment.seen) == [(0, 0)] * 2 + [(1, 0)] * 2
    assert (waits.failed, waits.given_up) == (3, 1)


def test_a_call_that_takes_too_long_is_given_up_and_what_it_says_later_ignored() -> None:
    release = threading.Event()

    def respond(action: Action) -> Observation:
        if action.ordinal == 0:
            release.wait(20)
        return Observation(reward=1.0)

    now_s = [0.0]
    environment = Scripted(respond)
    calls = ThreadedCalls(environment, threads=1, limit_s=5, attempts=2, clock=lambda: now_s[0])
    calls.submit(action(0))
    calls.submit(action(1))
    now_s[0] = 4.0
    assert calls.replies(0.0) == []
    now_s[0] = 5.5
    assert gather(calls, 1) == {(1, 0): Observation(reward=1.0)}
    while environment.seen.count((0, 0)) < 2:
        calls.replies(0.01)
    now_s[0] = 11.0
    found = gather(calls, 1)
    assert found == {(0, 0): Failed(reason="turn 1 was given up after 2 attempts: no reply in 5 s")}
    release.set()
    calls.submit(action(2))
    assert gather(calls, 1).keys() == {(2, 0)}
    assert calls.replies(0.05) == []


def test_too_many_calls_that_hang_end_the_worker() -> None:
    release, now_s = threading.Event(), [0.0]
    hanging = Scripted(lambda _: release.wait(20))
    calls = ThreadedCalls(hanging, threads=1, limit_s=1, attempts=1, clock=lambda: now_s[0])
    with pytest.raises(JobFailedError, match=r"5 calls of the environment hang, .* more than 1 s"):
        for ordinal in range(9):
            calls.submit(action(ordinal))
            now_s[0] += 2
            calls.replies(0.0)
    release.set()


def test_what_is_dropped_is_not_called_or_not_heard() -> None:
    release = threading.Event()

    def respond(action: Action) -> Observation:
        release.wait(20)
        return Observation(text=str(action.ordinal))

    environment = Scripted(respond)
    calls = ThreadedCalls(environment, threads=1)
    for ordinal in range(3):
        calls.submit(action(ordinal))
    calls.drop({(0, 0), (1, 0)})
    release.set()
    assert gather(calls, 1).keys() == {(2, 0)}
    assert calls.replies(0.0) == []
    assert environment.seen == [(0, 0), (2, 0)]


def fails(_: Action) -> Observation:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (fails, r"Scripted.respond for turn 1 of sample \(4, 0\): ZeroDivisionError: division"),
        (lambda _: "text", r"sample \(4, 0\) returned 'text', needed: an Observation"),
        (
            lambda _: Observation(reward=float("nan")),
            r"Observation\(reward=nan\): give a finite float",
        ),
        (lambda _: Observation(state="x" * 5000), "5002 bytes as JSON; keep at most 4096"),
        (lambda _: Observation(state=object()), "ArgumentError: .*give JSON values"),
    ],
)
def test_a_fault_in_the_environments_code_ends_the_worker_and_is_named(
    respond: Callable[[Action], Any], message: str
) -> None:
    calls = ThreadedCalls(Scripted(respond))
    calls.submit(action(4))
    with pytest.raises(JobFailedError, match=message):
        gather(calls, 1)


def test_waiting_times_are_told_every_few_seconds_with_their_tail() -> None:
    events: list[Event] = []
    waits = Waits(events.append)
    waits.tell(waiting=0, now_s=0.0)
    for tenths in range(1, 101):
        waits.add(tenths / 10)
    waits.tell(waiting=3, now_s=4.9)
    assert events == []
    waits.given_up = 1
    waits.tell(waiting=3, now_s=5.0)
    waits.tell(waiting=3, now_s=20.0)
    assert events == [
        EnvironmentWaits(
            calls=100,
            p50_s=5.0,
            p95_s=9.5,
            p99_s=9.9,
            longest_s=10.0,
            failed=0,
            given_up=1,
            waiting=3,
        )
    ]


def test_quantiles_are_of_the_values() -> None:
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]
    assert quantile([], 0.5) == 0.0
