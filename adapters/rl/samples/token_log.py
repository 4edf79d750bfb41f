"""A rollout worker's record log in its sidecar, from which its samples survive its loss."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast.adapters.rl.samples.token_record import encode_deltas
from holdfast.adapters.rl.samples.trajectory import Delta, Trajectory
from holdfast.adapters.shared.record_logs import LogStore
from holdfast.ckpt.errors import CapacityError, CkptError

_log = logging.getLogger(__name__)

_REOPEN_S = 0.2
_RECORD_TOKENS = 4096
_TOKEN_BYTES = 8
"""Approximate size of a token in a record; environment states are weighed by it."""

_TRUNCATE_BYTES = 16 << 10


class TokenLog:
    """Appends deltas; starts anew with everything held when the sidecar was replaced.

    A worker continues to sample without its log. A lost sidecar then costs tokens only if the
    worker is lost at the same time: those sampled since. If there is no memory for the log, one
    warning is logged and the log is tried again. ``written_bytes`` counts all records ever
    appended.
    """

    def __init__(self, store: Callable[[], LogStore], name: str) -> None:
        self._store, self._name = store, name
        self._open: LogStore | None = None
        self._retry_at = 0.0
        self._records: deque[tuple[int, int, int]] = deque()
        self._nbytes = self.written_bytes = 0
        self._is_refused = False

    def append(
        self, deltas: Sequence[Delta], trajectories: Callable[[], Iterable[Trajectory]]
    ) -> None:
        """Append ``deltas``; ``trajectories`` gives all, for a log that starts anew."""
        if self._open is None:
            if time.monotonic() < self._retry_at:
                return
            deltas = [_whole(trajectory) for trajectory in trajectories() if trajectory.tokens]
        if self._open is not None and not deltas:
            return
        try:
            if self._open is None:
                self._begin(deltas)
            else:
                self._write(self._open, deltas)
        except CkptError as error:
            self._refused(error)
            self._open = None
            self._retry_at = time.monotonic() + _REOPEN_S
        else:
            self._is_refused = False

    def _refused(self, error: CkptError) -> None:
        if isinstance(error, CapacityError) and not self._is_refused:
            _log.warning("%s is sampled without a token log: %s", self._name, error)
            self._is_refused = True

    def release(self, below: int) -> None:
        """Truncate the records of ordinals ``below``, once there are enough of them."""
        keep_from, store = None, self._open
        if store is None or self._nbytes < _TRUNCATE_BYTES:
            return
        while self._records and self._records[0][1] < below:
            index, _, nbytes = self._records.popleft()
            keep_from = index + 1
            self._nbytes -= nbytes
        if keep_from is None:
            return
        try:
            store.log_truncate(self._name, keep_from)
        except CkptError:
            self._open = None

    def _begin(self, deltas: Sequence[Delta]) -> None:
        """Write everything held, then truncate the records of an earlier start."""
        store = self._store()
        start = store.log_open(self._name)
        self._records.clear()
        self._nbytes = 0
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
        groups = list(_grouped(deltas))
        records = [encode_deltas(group) for group in groups]
        first = store.log_append(self._name, records) - len(records)
        for index, (group, record) in enumerate(zip(groups, records, strict=True), first):
            newest = max(delta.ordinal for delta in group)
            self._records.append((index, newest, len(record)))
            self._nbytes += len(record)
            self.written_bytes += len(record)


def _grouped(deltas: Sequence[Delta]) -> Iterator[list[Delta]]:
    """Yield the deltas that share a record: all of them, or parts if they are many."""
    group: list[Delta] = []
    count = 0
    for delta in deltas:
        weight = len(delta.tokens) + sum(len(turn.state) for turn in delta.turns) // _TOKEN_BYTES
        if group and count + weight > _RECORD_TOKENS:
            yield group
            group, count = [], 0
        group.append(delta)
        count += weight
    yield group


def _whole(trajectory: Trajectory) -> Delta:
    return Delta(
        ordinal=trajectory.ordinal,
        sample=trajectory.sample,
        start=0,
        tokens=tuple(trajectory.tokens),
        logprobs=trajectory.logprobs,
        stamps=trajectory.stamps,
        turns=trajectory.turns,
    )
