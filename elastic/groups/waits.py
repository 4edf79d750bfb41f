"""Waits for other ranks that end with the generation, and name a rank that will not come."""

from __future__ import annotations

import atexit
import math
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import Work

from holdfast.ckpt.errors import PeerError
from holdfast.elastic.channel.base import WORKER_ENV
from holdfast.elastic.errors import GenerationOverError

POLL_S = 0.004
"""Time that a wait sleeps between checks of the fence; completion wakes it at once."""

LOOK_AFTER_S = 0.5
"""Time that a wait for all ranks lasts before it looks for one that will not come, and between two
looks."""

GRACE_S = 3.0
"""Longest time by which an error may precede the fence that explains it."""

LOST_PEER_GRACE_S = 120.0
"""The same for an error of a connection, which another rank's end explains and no script causes.

The fence comes when the lease of the lost node ends, and later on busy processors. If nothing
ended, the agents see a rank that waits for the others, and form the group again.
"""

_LOST_PEER = re.compile(
    r"connection (reset|closed|refused)|broken pipe|(read|write) error|pair closure|no route to"
    r"|ncclRemoteError|remote process exit|the server has ended|no answer to",
    re.IGNORECASE,
)
"""The words in which gloo, NCCL, the system and a meeting point say that a connection ended."""

_EXIT_WAIT_S = 1.0

_left_behind: list[threading.Thread] = []


@atexit.register
def _end_without_left_behind() -> None:
    """End a worker immediately if a call that was left behind has not returned.

    If a thread returns from C++ to an interpreter that is shutting down, Python ends it by
    unwinding its stack. C++ treats that as an error, and the process would abort. The script's own
    atexit functions have already run, because this one was registered before them.
    """
    deadline_s = time.monotonic() + _EXIT_WAIT_S
    for thread in _left_behind:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if any(thread.is_alive() for thread in _left_behind):
        end_worker()


def end_worker() -> None:
    """End this process at once, with its exit code, if it is a worker: a thread cannot end."""
    if WORKER_ENV in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if hasattr(sys, "last_value") else 0)


def leave_behind(thread: threading.Thread) -> None:
    """Abandon a thread inside C++: the end of the process waits for it only briefly."""
    _left_behind[:] = [each for each in _left_behind if each.is_alive()] + [thread]


@dataclass(frozen=True, slots=True)
class Joined:
    """One of the collectives of all ranks: its group, and its number there, from 1.

    Ranks that do the same have the same numbers.
    """

    group: str
    number: int


class WaitGuard:
    """Guard of a generation's waits: interrupts them at the fence, and reports and times them.

    ``look``, if set, is called with the group, its ranks and the name of every collective before it
    starts. It may raise, or return True for a collective of the user's that is to meet only such
    ones. ``joined`` counts the collectives of all ranks that this rank has started, by group.
    """

    def __init__(
        self,
        generation: int,
        fenced: Callable[[], bool],
        *,
        waiting: Callable[[bool], None] = lambda _: None,
        grace_s: float = GRACE_S,
        lost_peer_grace_s: float = LOST_PEER_GRACE_S,
    ) -> None:
        self.generation, self._fenced, self._waiting = generation, fenced, waiting
        self._grace_s, self._lost_peer_grace_s = grace_s, lost_peer_grace_s
        self.look: Callable[[str, Sequence[int], str], bool] | None = None
        self._waited_s = self._all_waited_s = 0.0
        self._error: Exception | None = None
        self.joined: Counter[str] = Counter()
        self.absent: Callable[[Joined], None] = lambda joined: None
        """Called in a long wait in a collective of all ranks; raises if one will not come to it.
        """

    def own_s(self) -> float:
        """Read a clock, in seconds, that stops while this rank waits for others."""
        return time.perf_counter() - self._all_waited_s

    def take_waited_s(self) -> float:
        """Return the seconds waited for others since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    @property
    def fenced(self) -> bool:
        """True if the generation is over."""
        return self._fenced()

    def end(self, error: Exception) -> None:
        """End the generation for this rank: every `check` raises ``error``.

        So a script that catches it leaves the generation all the same.
        """
        self._error = error

    def check(self) -> None:
        """Raise ``GenerationOverError`` if the generation is over, or what it was ended with."""
        if self._error is not None:
            raise self._error
        if self._fenced():
            raise GenerationOverError(f"generation {self.generation} is over")

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Mark the body as waiting for others."""
        start = time.perf_counter()
        self._waiting(True)
        try:
            yield
        finally:
            self._waiting(False)
            waited_s = time.perf_counter() - start
            self._waited_s += waited_s
            self._all_waited_s += waited_s

    def explained(self, error: Exception) -> bool:
        """Wait a while for the fence that explains an error; return whether it came.

        An error of a connection waits for up to ``lost_peer_grace_s``, another for ``grace_s``.
        """
        lost_peer = _LOST_PEER.search(str(error)) is not None
        deadline = time.monotonic() + (self._lost_peer_grace_s if lost_peer else self._grace_s)
        with self.wait():
            while not self._fenced():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        return True

    def join(self, group: str) -> Joined:
        """Count one more collective of all ranks that this rank starts."""
        self.joined[group] += 1
        return Joined(group, self.joined[group])

    def call(
        self,
        blocking: Callable[[], Any],
        *,
        name: str,
        joined: Joined | None = None,
        limit_s: float | None = None,
    ) -> Any:
        """Run an uninterruptible call in a thread; leave the thread behind if fenced.

        ``joined`` is the collective for which all ranks make it. A call that takes longer than
        ``limit_s`` is left behind as well; then ``TimeoutError`` is raised.

        Every error of the call ends the wait. One that is not an ``Exception``, such as
        ``SystemExit``, becomes a ``RuntimeError`` that names it, because it concerns that thread
        and not the waiting one.
        """
        box: list[Any] = []
        errors: list[Exception] = []
        done = threading.Event()

        def run() -> None:
            try:
                box.append(blocking())
            except Exception as error:  # noqa: BLE001 - raised again by the waiting thread
                errors.append(error)
            except BaseException as error:  # noqa: BLE001 - must not end the waiting thread
                lost = RuntimeError(f"the call {name!r} ended with {error!r} and has no result")
                lost.__cause__ = error
                errors.append(lost)
            finally:
                done.set()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        look, until_s = _Looks(self, joined), time.monotonic() + (limit_s or math.inf)
        with self.wait():
            while not done.wait(POLL_S):
                late = time.monotonic() > until_s
                if late or self._fenced():
                    leave_behind(thread)
                self.check()
                if late:
                    raise TimeoutError(f"{name} takes longer than {limit_s:g} s")
                look()
        if errors:
            self.reraise(errors[0])
        return box[0]

    def reraise(self, error: Exception) -> NoReturn:
        """Raise the error, or ``GenerationOverError`` if a fence explains it."""
        if self.explained(error):
            raise GenerationOverError(f"generation {self.generation} is over: {error}") from error
        raise error

    def await_work(
        self, work: Work, *, timeout_s: float = 0.0, joined: Joined | None = None
    ) -> None:
        """Wait for a gloo operation; ``joined`` if it is a collective of all ranks.

        Its error becomes ``GenerationOverError`` if a fence explains it.
        """
        deadline = time.monotonic() + timeout_s if timeout_s else None
        look = _Looks(self, joined)
        poll = timedelta(seconds=POLL_S)
        try:
            while not work.is_completed():
                self.check()
                look()
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"collective not complete after {timeout_s:g} s")
                try:
                    work.wait(poll)
                except (RuntimeError, PeerError):
                    if work.is_completed():
                        break
            work.wait()
        except (RuntimeError, PeerError) as error:  # the latter if it connects, by its store
            self.reraise(error)


class _Looks:
    """The looks, during one wait, for a rank that will not come to it."""

    def __init__(self, guard: WaitGuard, joined: Joined | None) -> None:
        self._guard, self._joined = guard, joined
        self._next_s = time.monotonic() + LOOK_AFTER_S

    def __call__(self) -> None:
        if self._joined is not None and time.monotonic() > self._next_s:
            self._guard.absent(self._joined)
            self._next_s = time.monotonic() + LOOK_AFTER_S
