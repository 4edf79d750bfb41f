"""The thread on which a courier goes round beside the training of rank 0.

Training that waits for others has rounds made, at first at once and then less and less often: so
an island that waits long for another one takes neither a core nor requests of the store.
"""

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
_LONGEST_AWAITED_S: Final = 0.1
_GROWTH: Final = 1.5
_CLOSE_S: Final = 5.0


class Errands(Closing):
    """Goes round until it is closed; training waits for what it brings with a `NewsWait`.

    A store that fails is tried again for ``patience_s`` seconds. Other errors end the rounds;
    `check` raises them.
    `rounds` have ended, and `brought` of them something; both change under `news`.
    """

    def __init__(self, courier: Courier, *, patience_s: float) -> None:
        self.courier, self._patience_s = courier, patience_s
        self.news = threading.Condition()
        self.rounds = self.brought = 0
        self._closed, self._called = False, threading.Event()
        self._comes = self._has_moved = False
        self._error: HoldfastError | None = None
        courier.freight.wake = self._moved
        self._thread = threading.Thread(target=self._run, name="islands-courier", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the rounds, if there is one."""
        if self._error is not None:
            raise self._error

    def call(self) -> None:
        """Begin the next round at once, and others soon: a work waits for its protection."""
        self._comes = True
        self._called.set()

    def look(self) -> None:
        """Begin the next round at once; those that nobody asks for come as before."""
        self._called.set()

    @property
    def has_ended(self) -> bool:
        """True if an error has ended the rounds."""
        return self._error is not None

    def waiting(self) -> NewsWait:
        """Return a wait for news that begins now."""
        return NewsWait(self)

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
            has_moved, self._has_moved = self._has_moved, False
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
            with self.news:
                self.rounds += 1
                self.brought += changed or has_moved
                self.news.notify_all()
            has_come, self._comes = self._comes, False
            pause_s = _SHORTEST_S if changed or has_come else min(pause_s * _GROWTH, _LONGEST_S)
            if self._called.wait(0.0 if changed else pause_s):
                self._called.clear()

    def _moved(self) -> None:
        """Begin the next round at once: a transfer has ended."""
        self._has_moved = True
        self.look()

    def _fail(self, error: HoldfastError) -> None:
        with self.news:
            self._error = error
            self.news.notify_all()


class NewsWait:
    """A wait of training for what rounds bring: has them made, less and less often.

    Called again and again, it returns at the end of a round that was made for it, or as soon as a
    round since its last return brought something.
    """

    def __init__(self, errands: Errands) -> None:
        self._errands = errands
        self._seen, self._pause_s = errands.brought, 0.0

    def __call__(self, timeout_s: float) -> None:
        """Wait; for the round itself at most ``timeout_s`` seconds."""
        errands = self._errands
        with errands.news:
            if errands.news.wait_for(self._has_news, self._pause_s):
                self._seen, self._pause_s = errands.brought, 0.0
                return
            self._pause_s = min(max(_SHORTEST_S, self._pause_s * _GROWTH), _LONGEST_AWAITED_S)
            rounds = errands.rounds
            errands.look()
            errands.news.wait_for(lambda: errands.rounds > rounds or self._has_news(), timeout_s)
            if errands.brought > self._seen:
                self._seen, self._pause_s = errands.brought, 0.0

    def _has_news(self) -> bool:
        return self._errands.brought > self._seen or self._errands.has_ended


def _given_up(error: Exception, seconds: float) -> HoldfastError:
    if isinstance(error, CorruptError):
        return error
    return StoreError(f"the sea could not be reached for {seconds:g} s: {error}")
