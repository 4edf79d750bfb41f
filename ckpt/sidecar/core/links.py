"""Queues of work for peers: each peer has its own, so a slow or dead one delays no other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeAlias

from holdfast.ckpt.errors import CkptError, CorruptError, NotFoundError, PeerError
from holdfast.ckpt.memory.records import SidecarPeer
from holdfast.ckpt.transport import Client, RunKey
from holdfast.ckpt.types import Json

_log = logging.getLogger(__name__)

Job: TypeAlias = Callable[[Client], None]
"""A call to a peer; repeated while it raises a transient `PeerError`."""

CALL_TIMEOUT_S = 5.0
MAX_JOBS = 4096
"""The most jobs kept for one peer: the oldest are dropped."""

_BACKOFF_S = (0.005, 0.5)
_WORTH_REPEATING = ("", NotFoundError.code, CorruptError.code)
"""Transient refusals: no answer, a peer that lags behind, bytes damaged in transfer."""


def _always() -> bool:
    return True


@dataclass(slots=True, kw_only=True, eq=False)
class _Queued:
    job: Job
    is_wanted: Callable[[], bool]
    since_s: float = field(default_factory=monotonic)


class PeerQueue:
    """A queue of jobs for one peer, processed by ``lanes`` threads with a connection each.

    With one lane the jobs keep their order.
    """

    def __init__(self, peer: SidecarPeer, key: RunKey, *, purpose: str, lanes: int = 1) -> None:
        self.peer, self.error, self.dropped = peer, "", 0
        self._key = key
        self._jobs: deque[_Queued] = deque()
        self._running: list[_Queued] = []
        self._ready = threading.Condition()
        self._closed = False
        for lane in range(lanes):
            name = f"{purpose}-{peer.node}-{lane}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def put(self, job: Job, *, is_wanted: Callable[[], bool] = _always) -> None:
        """Queue a job; it is dropped once it is not wanted any more."""
        with self._ready:
            if len(self._jobs) >= MAX_JOBS:
                self._jobs = deque(each for each in self._jobs if each.is_wanted())
            if len(self._jobs) >= MAX_JOBS:
                self._jobs.popleft()
                self.dropped += 1
            self._jobs.append(_Queued(job=job, is_wanted=is_wanted))
            self._ready.notify()

    @property
    def queued(self) -> int:
        """The number of unfinished jobs."""
        return len(self._jobs) + len(self._running)

    def status(self) -> dict[str, Json]:
        """Return the length of the queue, the age of its oldest job, and the last error."""
        with self._ready:
            since_s = [each.since_s for each in (*self._running, *self._jobs)]
        oldest_s = monotonic() - min(since_s) if since_s else 0.0
        return {
            "queued": len(since_s),
            "oldest_s": round(oldest_s, 3),
            "dropped": self.dropped,
            "error": self.error,
        }

    def close(self) -> None:
        """Drop the queued jobs and end the threads; a call in progress ends by its own deadline."""
        with self._ready:
            self._closed = True
            self._jobs.clear()
            self._ready.notify_all()

    def _work(self) -> None:
        client = Client(self.peer.address, self._key, timeout_s=CALL_TIMEOUT_S, watch=True)
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._closed or self._jobs)
                if self._closed:
                    break
                queued = self._jobs.popleft()
                self._running.append(queued)
            self._repeat(queued, client)
            with self._ready:
                self._running.remove(queued)
        client.close()

    def _repeat(self, queued: _Queued, client: Client) -> None:
        pause_s, longest_s = _BACKOFF_S
        while not self._closed and queued.is_wanted():
            try:
                queued.job(client)
            except PeerError as error:
                self.error = str(error)
                if not is_passing(error):
                    _log.warning("%s refused: %s", self.peer.node, error)
                    return
            except CkptError as error:  # fenced, or its subject is gone
                self.error = str(error)
                return
            except Exception as error:  # noqa: BLE001 - logged; the queue continues
                if not self._closed:
                    _log.exception("a job for %s failed", self.peer.node)
                self.error = repr(error)
                return
            else:
                self.error = ""
                return
            with self._ready:
                self._ready.wait_for(lambda: self._closed, timeout=pause_s)
            pause_s = min(pause_s * 2, longest_s)


def is_passing(error: PeerError) -> bool:
    """Return whether a refused call is worth repeating."""
    return error.peer_code in _WORTH_REPEATING


def send(client: Client, op: str, body: Json) -> None:
    """Send a message that needs only an acknowledgement."""
    client.call(op, body)
