"""Calls of an environment on threads, so that slow calls delay nothing else.

Threads are enough, since a slow environment waits for something else (a sandbox, a service, its own
process) and lets other threads run meanwhile. But a thread cannot be stopped: a call that takes
longer than the limit is abandoned and made again. If its last attempt fails as well, the episode
ends with reward 0 and the reason. The number of abandoned calls that still run is bounded.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.adapters.rl.environments.base import (
    Action,
    Environment,
    Failed,
    Observation,
    Reply,
    ToolError,
)
from holdfast.adapters.rl.environments.waits import Waits
from holdfast.adapters.rl.samples.trajectory import SampleId
from holdfast.elastic.errors import JobFailedError

_HUNG_PER_THREAD = 4


@dataclass(slots=True, kw_only=True)
class _PendingCall:
    """A turn that needs a reply: its time of submission, and its number of attempts."""

    action: Action
    since: float
    attempts: int = 0
    began: float = 0.0
    is_wanted: bool = True


class ThreadedCalls:
    """The calls of the module's docstring. All methods are for one thread, the worker's.

    ``threads`` calls run at a time, each for at most ``limit_s`` seconds and at most ``attempts``
    times if it fails (`ToolError`) or takes longer. ``clock`` counts seconds.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        threads: int = 8,
        limit_s: float = 60.0,
        attempts: int = 2,
        waits: Waits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._environment, self._threads = environment, threads
        self._limit_s, self._attempts, self._clock = limit_s, attempts, clock
        self._waits = waits or Waits()
        self._queue: deque[_PendingCall] = deque()
        self._running: dict[int, _PendingCall] = {}
        self._hung: set[int] = set()
        self._started = 0
        self._returned: queue.SimpleQueue[tuple[int, object]] = queue.SimpleQueue()

    def submit(self, action: Action) -> None:
        """Request the reply to a turn."""
        self._queue.append(_PendingCall(action=action, since=self._clock()))
        self._start()

    def replies(self, wait_s: float) -> list[tuple[SampleId, Reply]]:
        """Return, once each, the replies that came; wait up to ``wait_s`` for the first.

        Raises ``JobFailedError`` if the environment raised an error other than `ToolError`, or if
        too many calls hang.
        """
        self._start()
        found = list(self._take(wait_s))
        self._start()
        waiting = sum(call.is_wanted for call in self._running.values()) + len(self._queue)
        self._waits.tell(waiting=waiting, now_s=self._clock())
        return found

    def drop(self, keys: set[SampleId]) -> None:
        """Forget the calls of these samples; running ones are not stopped."""
        self._queue = deque(call for call in self._queue if call.action.key not in keys)
        for call in self._running.values():
            if call.action.key in keys:
                call.is_wanted = False

    # -- threads -----------------------------------------------------------------------------

    def _start(self) -> None:
        while self._queue and len(self._running) < self._threads:
            call = self._queue.popleft()
            call.began, call.attempts = self._clock(), call.attempts + 1
            number, self._started = self._started, self._started + 1
            self._running[number] = call
            threading.Thread(
                target=self._respond,
                args=(number, call.action),
                name=f"environment-{number}",
                daemon=True,
            ).start()

    def _respond(self, number: int, action: Action) -> None:
        try:
            found: object = self._environment.respond(action)
        except Exception as error:  # noqa: BLE001 - handled in the worker's thread
            found = error
        self._returned.put((number, found))

    # -- results -----------------------------------------------------------------------------

    def _arrived(self, wait_s: float) -> Iterator[tuple[int, object]]:
        """Yield (number of the call, result) of finished threads; wait for the first."""
        while True:
            try:
                yield self._returned.get(block=wait_s > 0, timeout=wait_s or None)
            except queue.Empty:
                return
            wait_s = 0.0

    def _take(self, wait_s: float) -> Iterator[tuple[SampleId, Reply]]:
        for number, found in self._arrived(wait_s):
            call = self._running.pop(number, None)
            self._hung.discard(number)
            if call is not None and call.is_wanted:
                reply = self._judge(call, found)
                if reply is not None:
                    self._waits.add(self._clock() - call.since)
                    yield call.action.key, reply
        for number, call in list(self._running.items()):
            if self._clock() - call.began <= self._limit_s:
                continue
            del self._running[number]
            self._hung.add(number)
            reply = (
                self._again(call, f"no reply in {self._limit_s:g} s") if call.is_wanted else None
            )
            if reply is not None:
                yield call.action.key, reply
        if len(self._hung) > _HUNG_PER_THREAD * self._threads:
            raise JobFailedError(
                f"{len(self._hung)} calls of the environment hang, each for more than "
                f"{self._limit_s:g} s: see to its tools, or give it a longer limit_s"
            )

    def _judge(self, call: _PendingCall, found: object) -> Reply | None:
        """Return the reply, or None if the call is made again."""
        if isinstance(found, Observation):
            return found
        if isinstance(found, ToolError):
            return self._again(call, str(found) or "a tool failed")
        action, environment = call.action, type(self._environment).__name__
        where = f"{environment}.respond for turn {action.turn} of sample {action.key}"
        if isinstance(found, Exception):
            raise JobFailedError(f"{where}: {type(found).__name__}: {found}") from found
        raise JobFailedError(f"{where} returned {found!r}, needed: an Observation")

    def _again(self, call: _PendingCall, why: str) -> Failed | None:
        self._waits.failed += 1
        if call.attempts < self._attempts:
            self._queue.append(call)
            return None
        self._waits.given_up += 1
        return Failed(
            reason=f"turn {call.action.turn} was given up after {call.attempts} attempts: {why}"
        )
