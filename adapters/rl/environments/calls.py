"""Calls of an environment that delay nothing else: made again when they fail, and then given up.

A call that takes longer than the limit is abandoned and made again. If its last attempt fails as
well, the episode ends with reward 0 and the reason. `CallQueue` has these rules for every place
that calls can run in: threads (`ThreadedCalls`), or processes of their own
(`holdfast.adapters.rl.environments.processes.calls`).

Threads are enough for a slow environment that waits for something else (a sandbox, a service). But
a thread cannot be stopped: the number of abandoned calls that still run is bounded.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFault:
    """An error of the environment's code: ``words`` follow the name of the call."""

    words: str
    cause: Exception | None = None


Result = Observation | ToolError | CodeFault
"""The result of an attempt; a `ToolError` may be no error of a tool, but the end of a process."""


class CallQueue(ABC):
    """The rules of the module's docstring. All methods are for one thread, the worker's.

    Each call may take ``limit_s`` seconds, and is made at most ``attempts`` times. ``name`` is the
    environment's, for messages. ``clock`` counts seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        limit_s: float,
        attempts: int,
        waits: Waits | None,
        clock: Callable[[], float],
    ) -> None:
        self._name, self._limit_s, self._attempts = name, limit_s, attempts
        self._clock, self._waits = clock, waits or Waits()
        self._queue: deque[_PendingCall] = deque()
        self._running: dict[int, _PendingCall] = {}
        self._started = 0

    @abstractmethod
    def _begin(self, number: int, action: Action) -> bool:
        """Begin the call with this number; False if there is no room for another."""

    @abstractmethod
    def _arrived(self, wait_s: float) -> Iterator[tuple[int, Result]]:
        """Yield (number of the call, result) of those that are over; wait for the first."""

    @abstractmethod
    def _abandon(self, number: int, why: str) -> None:
        """Stop a call, or ignore its result."""

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

    def _start(self) -> None:
        while self._queue and self._begin(self._started, self._queue[0].action):
            call = self._queue.popleft()
            call.began, call.attempts = self._clock(), call.attempts + 1
            self._running[self._started] = call
            self._started += 1

    def _take(self, wait_s: float) -> Iterator[tuple[SampleId, Reply]]:
        for number, found in self._arrived(wait_s):
            call = self._running.pop(number, None)
            if call is not None and call.is_wanted:
                reply = self._judge(call, found)
                if reply is not None:
                    self._waits.add(self._clock() - call.since)
                    yield call.action.key, reply
        for number, call in list(self._running.items()):
            if self._clock() - call.began <= self._limit_s:
                continue
            del self._running[number]
            why = f"no reply in {self._limit_s:g} s"
            self._abandon(number, why)
            reply = self._again(call, why) if call.is_wanted else None
            if reply is not None:
                yield call.action.key, reply

    def _judge(self, call: _PendingCall, found: Result) -> Reply | None:
        """Return the reply, or None if the call is made again."""
        if isinstance(found, Observation):
            return found
        if isinstance(found, ToolError):
            return self._again(call, str(found) or "a tool failed")
        action = call.action
        where = f"{self._name}.respond for turn {action.turn} of sample {action.key}"
        raise JobFailedError(f"{where}{found.words}") from found.cause

    def _again(self, call: _PendingCall, why: str) -> Failed | None:
        self._waits.failed += 1
        if call.attempts < self._attempts:
            self._queue.append(call)
            return None
        self._waits.given_up += 1
        return Failed(
            reason=f"turn {call.action.turn} was given up after {call.attempts} attempts: {why}"
        )


class ThreadedCalls(CallQueue):
    """A `CallQueue` of ``threads`` calls at a time, each on a thread."""

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
        super().__init__(
            type(environment).__name__,
            limit_s=limit_s,
            attempts=attempts,
            waits=waits,
            clock=clock,
        )
        self._environment, self._threads = environment, threads
        self._hung: set[int] = set()
        self._returned: queue.SimpleQueue[tuple[int, Result]] = queue.SimpleQueue()

    def _begin(self, number: int, action: Action) -> bool:
        if len(self._running) >= self._threads:
            return False
        threading.Thread(
            target=self._respond, args=(number, action), name=f"environment-{number}", daemon=True
        ).start()
        return True

    def _respond(self, number: int, action: Action) -> None:
        self._returned.put((number, self._result(action)))

    def _result(self, action: Action) -> Result:
        try:
            found: object = self._environment.respond(action)
        except ToolError as error:
            return error
        except Exception as error:  # noqa: BLE001 - raised in the worker's thread
            return CodeFault(words=f": {type(error).__name__}: {error}", cause=error)
        if isinstance(found, Observation):
            return found
        return CodeFault(words=f" returned {found!r}, needed: an Observation")

    def _arrived(self, wait_s: float) -> Iterator[tuple[int, Result]]:
        while True:
            try:
                number, found = self._returned.get(block=wait_s > 0, timeout=wait_s or None)
            except queue.Empty:
                return
            self._hung.discard(number)
            yield number, found
            wait_s = 0.0

    def _abandon(self, number: int, why: str) -> None:
        self._hung.add(number)
        if len(self._hung) > _HUNG_PER_THREAD * self._threads:
            raise JobFailedError(
                f"{len(self._hung)} calls of the environment hang, each for more than "
                f"{self._limit_s:g} s: see to its tools, or give it a longer limit_s"
            )
