"""A sidecar's way of writing: at low priority, at the set pace, with retries."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Final, TypeVar

from holdfast.ckpt.errors import CkptError, CorruptError, FencedError, GivenUpError
from holdfast.ckpt.memory.target import CheckpointTarget
from holdfast.ckpt.native.priority import yield_to_others
from holdfast.ckpt.sidecar.persist.bandwidth import Bucket

PACK_THREADS: Final = 1
"""The threads besides the writing one, for compressed or urgent writes; otherwise none.

A thread that computes checksums ahead makes a pack durable sooner, and costs trainers more: bytes
are no longer in the cache when they are sent. Uncompressed bytes for a local disk need no work
ahead: they are checksummed as they are copied to the disk's buffer.
"""

BACKOFF_S: Final = (0.5, 15.0)
"""The first pause after a failure, and the longest; each is twice the one before."""

_HOPELESS: Final = (CorruptError, FencedError, GivenUpError)

_T = TypeVar("_T")


class PacedWriter:
    """Pace, priority and retries of the threads that write this node's part of checkpoints."""

    def __init__(self) -> None:
        self.priority = ""
        self._thread = threading.local()
        self._closing = threading.Event()
        self._pacer = Bucket()
        self._lock = threading.Lock()

    def close(self) -> None:
        """End every pause; writes in progress end with ``GivenUpError``."""
        self._closing.set()

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._closing.is_set()

    def yield_to_others(self) -> None:
        """Lower the calling thread's priority, once."""
        if not getattr(self._thread, "is_low", False):
            self.priority = yield_to_others()
            self._thread.is_low = True

    def pace(self, nbytes: int, *, bytes_per_s: int) -> None:
        """Wait as long as the rate demands after ``nbytes``."""
        with self._lock:
            if self._pacer.bytes_per_s != bytes_per_s:
                self._pacer = Bucket(bytes_per_s)
            wait_s = self._pacer.pay(nbytes, now_s=monotonic())
        if self._closing.wait(wait_s) if wait_s > 0 else self._closing.is_set():
            raise GivenUpError("the sidecar ends")

    def persevere(
        self,
        work: Callable[[], _T],
        target: CheckpointTarget,
        *,
        failed: Callable[[int, Exception], None],
    ) -> _T:
        """Do ``work``, up to ``target.retries`` times more when the store refuses.

        ``failed(attempt, error)`` is called at each failure that is retried, and may raise.
        """
        pause_s, longest_s = BACKOFF_S
        for attempt in range(1, target.retries + 1):
            try:
                return work()
            except (CkptError, OSError) as error:
                if isinstance(error, _HOPELESS):
                    raise
                failed(attempt, error)
            if self._closing.wait(pause_s):
                raise GivenUpError("the sidecar ends")
            pause_s = min(2 * pause_s, longest_s)
        return work()
