"""The keeper of the node's lease; it ends the workers before the lease can run out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.elastic.agent.config import AgentTiming
from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError


class LeaseKeeper:
    """A thread that renews the lease, so that a slow agent loop cannot lose it.

    If no renewal succeeded for ``self_fence_s``, it gives the lease up: a node that can send but
    not receive would keep it for ever, and the others would wait. It then calls ``fence``, which
    kills the workers from this thread, so that they are gone before the coordinator lets another
    node replace them. Then it calls ``lost`` and ends. It does the same if the coordinator reports
    that the lease has ended. After every renewal it calls ``extend`` with the time on the monotonic
    clock (ns) until which the node may act. The workers and the sidecar obey this limit even while
    this process is stopped and cannot fence.
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
        sent_s = time.monotonic()
        self.lease = coordinator.grant(timing.lease_ttl_s)
        self._renew(sent_s)
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()
        self._guard = threading.Thread(target=self._watch_clock, name="self-fence", daemon=True)
        self._guard.start()

    def _renew(self, sent_s: float) -> None:
        """Count from the request of a renewal: the coordinator's clock started no earlier."""
        self._renewed = sent_s
        self._extend(int((sent_s + self._timing.self_fence_s) * 1e9))

    def _keep(self) -> None:
        while not self._closed.wait(self._timing.keep_alive_s):
            sent_s = time.monotonic()
            try:
                self._coordinator.keep_alive(self.lease)
            except LeaseExpiredError:
                self._give_up()
                return
            except CoordinatorError:
                continue
            with self._changing:
                if not self._closed.is_set():  # else the answer is about a lease already given up
                    self._renew(sent_s)

    def _watch_clock(self) -> None:
        """Check this machine's monotonic clock, even while a renewal is pending."""
        while not self._closed.wait(self._timing.keep_alive_s / 5):
            if time.monotonic() - self._renewed > self._timing.self_fence_s:
                self._give_up()

    def _give_up(self) -> None:
        """End the workers and report the loss, once, on the thread that detects it first."""
        with self._changing:
            if self._closed.is_set():
                return
            self._closed.set()
        self._fence()
        self._lost()

    def close(self) -> None:
        """Stop renewing; the caller revokes the lease itself."""
        self._closed.set()
        self._thread.join(timeout=2)
