"""A rollout worker's record log in its sidecar: what it sampled outlives it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from adapters.rl.trajectory import Delta, Trajectory, encode_delta
from ckpt.errors import CapacityError, CkptError

_REOPEN_S = 0.2
_TRUNCATE_RECORDS = 256


class LogStore(Protocol):
    """The sidecar client's log operations, or a fake's."""

    def log_open(self, name: str) -> int:
        """Make or find a log; return the index of its next record."""

    def log_append(self, name: str, records: Sequence[bytes]) -> int:
        """Append records; return the next index."""

    def log_truncate(self, name: str, keep_from: int) -> None:
        """Drop the records before index ``keep_from``."""


class TokenLog:
    """Appends deltas; begins anew with everything held when the sidecar was replaced.

    A worker goes on sampling without its log: what a lost sidecar costs is only that the worker's
    own loss, at that same time, would cost the tokens sampled since.
    """

    def __init__(self, store: Callable[[], LogStore], name: str) -> None:
        self._store, self._name = store, name
        self._open: LogStore | None = None
        self._retry_at = 0.0
        self._records: deque[tuple[int, int]] = deque()

    def append(self, deltas: Sequence[Delta], held: Callable[[], Iterable[Trajectory]]) -> None:
        """Append ``deltas``; ``held`` gives all trajectories, for a log that begins anew."""
        if self._open is None:
            if time.monotonic() < self._retry_at:
                return
            deltas = [_whole(trajectory) for trajectory in held() if trajectory.tokens]
        if self._open is not None and not deltas:
            return
        try:
            if self._open is None:
                self._begin(deltas)
            else:
                self._write(self._open, deltas)
        except CkptError:
            self._open = None
            self._retry_at = time.monotonic() + _REOPEN_S

    def release(self, below: int) -> None:
        """Let go of the records of ordinals ``below``, once there are enough of them."""
        keep_from, store = None, self._open
        if store is None or len(self._records) < _TRUNCATE_RECORDS:
            return
        while self._records and self._records[0][1] < below:
            keep_from = self._records.popleft()[0] + 1
        if keep_from is None:
            return
        try:
            store.log_truncate(self._name, keep_from)
        except CkptError:
            self._open = None

    def _begin(self, deltas: Sequence[Delta]) -> None:
        """Write everything held, then let go of what an earlier beginning left."""
        store = self._store()
        start = store.log_open(self._name)
        self._records.clear()
        try:
            self._write(store, deltas)
        except CapacityError:
            store.log_truncate(self._name, start)
            self._write(store, deltas)
        else:
            store.log_truncate(self._name, start)
        self._open = store

    def _write(self, store: LogStore, deltas: Sequence[Delta]) -> None:
        if not deltas:
            return
        after = store.log_append(self._name, [encode_delta(delta) for delta in deltas])
        self._records += [
            (after - len(deltas) + i, delta.ordinal) for i, delta in enumerate(deltas)
        ]


def _whole(trajectory: Trajectory) -> Delta:
    return Delta(
        ordinal=trajectory.ordinal,
        sample=trajectory.sample,
        start=0,
        tokens=trajectory.tokens,
        logprobs=trajectory.logprobs,
        stamps=trajectory.stamps,
    )
