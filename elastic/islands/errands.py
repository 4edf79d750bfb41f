"""The thread on which a courier goes round beside the training of rank 0."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.errors import CorruptError, HoldfastError, PeerError, StoreError
from holdfast.elastic.islands.courier import Courier

_log = logging.getLogger(__name__)

_SHORTEST_S: Final = 0.01
_LONGEST_S: Final = 0.5
_GROWTH: Final = 1.5
_CLOSE_S: Final = 5.0


class Errands(Closing):
    """Goes round until it is closed; training waits for what it brings with `await_news`.

    A store that fails is tried again for ``patience_s`` seconds. Other errors end the rounds;
    `check` raises them.
    """

    def __init__(self, courier: Courier, *, patience_s: float) -> None:
        self.courier, self._patience_s = courier, patience_s
        self._news = threading.Condition()
        self._rounds = 0
        self._closed, self._called = False, threading.Event()
        self._error: HoldfastError | None = None
        courier.freight.wake = self.call
        self._thread = threading.Thread(target=self._run, name="islands-courier", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the rounds, if there is one."""
        if self._error is not None:
            raise self._error

    def call(self) -> None:
        """Begin the next round at once."""
        self._called.set()

    def await_news(self, timeout_s: float) -> None:
        """Wait for the end of a round that begins now, at most so long."""
        with self._news:
            seen = self._rounds
            self.call()
            self._news.wait_for(lambda: self._rounds > seen or self._error, timeout_s)

    def close(self) -> None:
        """End the rounds and transfers; what is under way is waited for a few seconds."""
        self.end(_CLOSE_S)

    def end(self, timeout_s: float) -> bool:
        """End the rounds and transfers, wait for those under way; return whether they have ended.

        A transfer ends at its next piece.
        """
        end_s = time.monotonic() + timeout_s
        self._closed = True
        self.courier.freight.stop()
        self._called.set()
        self._thread.join(timeout_s)
        rests = self.courier.freight.rest(max(0.0, end_s - time.monotonic()))
        return rests and not self._thread.is_alive()

    def _run(self) -> None:
        pause_s, failing_s = _SHORTEST_S, 0.0
        while not self._closed:
            try:
                changed = self.courier.turn()
                failing_s = 0.0
            except (StoreError, PeerError, OSError) as error:
                now_s = time.monotonic()
                failing_s = failing_s or now_s
                if now_s - failing_s > self._patience_s:
                    self._fail(_given_up(error, self._patience_s))
                    return
                _log.warning("the sea cannot be reached; trying again: %s", error)
                changed, pause_s = False, _LONGEST_S
            except HoldfastError as error:
                self._fail(error)
                return
            with self._news:
                self._rounds += 1
                self._news.notify_all()
            pause_s = _SHORTEST_S if changed else min(pause_s * _GROWTH, _LONGEST_S)
            if self._called.wait(0.0 if changed else pause_s):
                self._called.clear()

    def _fail(self, error: HoldfastError) -> None:
        with self._news:
            self._error = error
            self._news.notify_all()


def _given_up(error: Exception, seconds: float) -> HoldfastError:
    if isinstance(error, CorruptError):
        return error
    return StoreError(f"the sea could not be reached for {seconds:g} s: {error}")
