"""The present protection of the run, watched by a thread that never delays a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.sidecar.client import SidecarClient

EVERY_S = 1.0
"""Shortest time between two requests to the sidecar."""

_WAIT_S = 1.0
_STEPS_KEPT = 256
_FRESH_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The present restore point and the cost of the snapshots.

    ``step`` is the newest step known to be protected (the restored step until this generation has
    one; -1 for none). ``age_s`` is the time since it was complete, which is the work that a failure
    would cost. ``protected_after_s`` is the time that a step last took to become protected.
    ``copy_s`` and ``stall_s`` are those of the last snapshot; ``copied_bytes`` is the sum over this
    rank's snapshots in this generation. ``discarded`` counts the snapshots that were discarded
    because the tensor ``torn`` was written to during the copy.
    """

    step: int
    age_s: float
    protected_after_s: float | None = None
    copy_s: float = 0.0
    stall_s: float = 0.0
    copied_bytes: int = 0
    discarded: int = 0
    torn: str | None = None


class ProtectionWatch:
    """Polls the sidecar for protected steps; safe to share between threads.

    The watch's thread calls ``tell(step, seconds)`` whenever it sees a step become protected,
    ``seconds`` after the step was complete, and ``tell_why(step, reason)`` once for each reason why
    a step is not. It holds no reference to the training state.
    """

    def __init__(
        self,
        client: SidecarClient,
        *,
        generation: int,
        restored: int,
        tell: Callable[[int, float], None],
        tell_why: Callable[[int, str], None],
    ) -> None:
        self._client, self._generation, self._tell = client, generation, tell
        self._changed = threading.Condition()
        self._taken_s: dict[int, float] = {}
        self._step, self._complete_s, self._seen = restored, time.monotonic(), -1
        self._after_s: float | None = None
        self._tell_why, self._why = tell_why, dict[str, str]()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="protection", daemon=True)
        self._thread.start()

    def taken(self, step: int) -> None:
        """Note that ``step`` is complete and its snapshot begins."""
        with self._changed:
            self._taken_s[step] = time.monotonic()
            while len(self._taken_s) > _STEPS_KEPT:
                del self._taken_s[next(iter(self._taken_s))]
            self._changed.notify_all()

    def now(self) -> Protection:
        """Return the known protection; sends no message."""
        with self._changed:
            age_s = max(0.0, time.monotonic() - self._complete_s)
            return Protection(step=self._step, age_s=age_s, protected_after_s=self._after_s)

    def close(self) -> None:
        """Stop watching; does not wait for a pending answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _watch(self) -> None:
        while (step := self._next()) is not None:
            began_s = time.monotonic()
            try:
                reached = self._client.protected_step(
                    generation=self._generation, at_least=step, timeout_s=_WAIT_S
                )
                if reached < step:
                    self._ask_why()
            except CkptError:
                reached = -1  # try again later; the agent itself notices a dead sidecar
            waited = time.monotonic() - began_s > _FRESH_S
            self._note(reached, requested=step, requested_s=None if waited else began_s)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, EVERY_S)

    def _ask_why(self) -> None:
        """Report why overdue steps are not protected, if the sidecar knows."""
        found: dict[str, str] = self._client.status()["unprotected"]
        for at, why in found.items():
            generation, step = map(int, at.split("/"))
            if generation == self._generation and self._why.get(at) != why:
                self._tell_why(step, why)
        self._why = found

    def _next(self) -> int | None:
        """Wait for a snapshot not known to be protected; return the newest's step.

        One taken some time ago may be protected already, so that its time cannot be measured. Then
        wait for the next one instead, for a limited time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._newest() > self._seen)
            newest = self._newest()
            if time.monotonic() - self._taken_s.get(newest, 0.0) > _FRESH_S:
                self._changed.wait_for(lambda: self._closed or self._newest() > newest, EVERY_S)
            return None if self._closed else self._newest()

    def _newest(self) -> int:
        return max(self._taken_s, default=-1)

    def _note(self, reached: int, *, requested: int, requested_s: float | None) -> None:
        """Record an answer; without ``asked_s`` it came at the moment the step was protected."""
        with self._changed:
            if self._closed or reached not in self._taken_s or reached <= self._seen:
                return
            self._step = self._seen = reached
            self._complete_s = taken_s = self._taken_s[reached]
            self._taken_s = {s: at for s, at in self._taken_s.items() if s >= reached}
            if reached != requested or (
                requested_s is not None and requested_s - taken_s > _FRESH_S
            ):
                return
            self._after_s = after_s = time.monotonic() - taken_s
        self._tell(reached, after_s)
