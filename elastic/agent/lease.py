"""Keeping the node's lease alive, and ending the workers before it can run out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elastic.agent.config import Timing
from elastic.coordinator.base import Coordinator
from elastic.errors import CoordinatorError, LeaseExpired


class LeaseKeeper:
    """A thread that renews the lease, so that nothing the loop does can cost it.

    When no renewal succeeded for ``self_fence_s`` it calls ``fence`` (kills the workers, from
    this thread): they are gone before the coordinator lets anyone replace them. When the lease
    is lost it calls ``lost`` once and ends.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        timing: Timing,
        fence: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self._coordinator, self._timing = coordinator, timing
        self._fence, self._lost = fence, lost
        self._closed = threading.Event()
        self.lease = coordinator.grant(timing.lease_ttl_s)
        self._renewed = time.monotonic()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()
        self._guard = threading.Thread(target=self._watch_clock, name="self-fence", daemon=True)
        self._guard.start()

    def _keep(self) -> None:
        while not self._closed.wait(self._timing.keep_alive_s):
            asked = time.monotonic()
            try:
                self._coordinator.keep_alive(self.lease)
            except LeaseExpired:
                self._closed.set()
                self._fence()
                self._lost()
                return
            except CoordinatorError:
                continue
            self._renewed = asked

    def _watch_clock(self) -> None:
        """Judge by this machine's monotonic clock, even while a renewal is under way."""
        while not self._closed.wait(self._timing.keep_alive_s / 5):
            if time.monotonic() - self._renewed > self._timing.self_fence_s:
                self._fence()

    def close(self) -> None:
        """Stop renewing; the lease itself is the caller's to revoke."""
        self._closed.set()
        self._thread.join(timeout=2)
