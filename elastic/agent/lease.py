"""Keeping the node's lease alive, and ending the workers before it can run out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.elastic.agent.config import AgentTiming
from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError


class LeaseKeeper:
    """A thread that renews the lease, so that nothing the loop does can cost it.

    When no renewal succeeded for ``self_fence_s`` it gives the lease up: a node that is heard but
    hears nothing would keep it for ever, and the others waiting. It then calls ``fence`` (kills
    the workers, from its own thread: they are gone before the coordinator lets anyone replace
    them), then ``lost``, and ends; the same when the coordinator says that the lease has ended.
    ``extend`` is told, after every renewal, until when on the monotonic clock (ns) the node may
    act: its workers and its sidecar keep to it even while this process is stopped and can fence
    nobody.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        timing: AgentTiming,
        fence: Callable[[], None],
        lost: Callable[[], None],
        extend: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._coordinator, self._timing = coordinator, timing
        self._fence, self._lost, self._extend = fence, lost, extend
        self._closed = threading.Event()
        self._changing = threading.Lock()
        asked = time.monotonic()
        self.lease = coordinator.grant(timing.lease_ttl_s)
        self._renew(asked)
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()
        self._guard = threading.Thread(target=self._watch_clock, name="self-fence", daemon=True)
        self._guard.start()

    def _renew(self, asked: float) -> None:
        """Count from when a renewal was asked for: the coordinator's clock started no earlier."""
        self._renewed = asked
        self._extend(int((asked + self._timing.self_fence_s) * 1e9))

    def _keep(self) -> None:
        while not self._closed.wait(self._timing.keep_alive_s):
            asked = time.monotonic()
            try:
                self._coordinator.keep_alive(self.lease)
            except LeaseExpiredError:
                self._give_up()
                return
            except CoordinatorError:
                continue
            with self._changing:
                if not self._closed.is_set():  # else it answered for a lease that was given up
                    self._renew(asked)

    def _watch_clock(self) -> None:
        """Judge by this machine's monotonic clock, even while a renewal is under way."""
        while not self._closed.wait(self._timing.keep_alive_s / 5):
            if time.monotonic() - self._renewed > self._timing.self_fence_s:
                self._give_up()

    def _give_up(self) -> None:
        """End the workers and say so: once, whichever thread finds out first."""
        with self._changing:
            if self._closed.is_set():
                return
            self._closed.set()
        self._fence()
        self._lost()

    def close(self) -> None:
        """Stop renewing; the lease itself is the caller's to revoke."""
        self._closed.set()
        self._thread.join(timeout=2)
