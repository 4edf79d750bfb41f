"""The log of finished work of a round: a chunk that was sampled is not sampled again.

Every rank appends to a log of its seat in its node's sidecar, with copies on other nodes. After a
loss, rank 0 reads the logs of all who may have written. An entry belongs to a step and to the
digest of the weights that sampled it, so it is found again only where it is the same work.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Final

from holdfast.adapters.hf.grpo.records import chosen, join, split
from holdfast.adapters.shared.record_logs import LogStore, read_records
from holdfast.ckpt.errors import CapacityError, CkptError
from holdfast.elastic import Run, session_of

_log = logging.getLogger(__name__)

_READ_S: Final = 3.0

Writer = tuple[str, str]
"""The seat and the node of a rank that has a log."""


def name_of(seat: str) -> str:
    """Return the name of the log of a seat."""
    return f"completions-{seat.replace('/', '-')}"


class FinishedWork:
    """The entries of one generation's rank; without its sidecar, or without memory, none are kept.

    A key begins with the step, then has the stage of the script and whatever else tells the work.

    ``writers`` are the ranks of this generation and of earlier ones whose logs may be needed; they
    belong in the state.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._session = run, session_of(run)
        self.present: list[Writer] = [(m.seat, m.node) for m in self._session.members]
        self.writers = list(self.present)
        self._name = name_of(self._session.members[run.rank].seat)
        self._store: LogStore | None = None
        self._steps: deque[tuple[int, int]] = deque()
        self._is_refused = False
        self._entries: dict[str, bytes] | None = None
        self._newest = -1

    def inherit(self, writers: list[Writer]) -> None:
        """Add the writers of a restored state."""
        self.writers += [each for each in writers if each not in self.writers]

    def found(self, begin: str) -> dict[str, bytes]:
        """Return the entries of all writers whose keys begin so; for rank 0.

        ``begin`` begins with the present step. The logs are read once: they get nothing new for
        steps that were sampled before.
        """
        if self._entries is None:
            self._entries = {}
            for seat, node in self.writers:
                logs = self._session.sidecar
                found = read_records(logs, name_of(seat), join, node=node, limit_s=_READ_S)
                self._entries |= found
            self._newest = max(map(_step_of, self._entries), default=-1)
        present = _step_of(begin)
        self._entries = {key: v for key, v in self._entries.items() if _step_of(key) >= present}
        return chosen(self._entries, begin=begin)

    @property
    def is_over(self) -> bool:
        """True if no restore needs the work of ranks that are gone; for rank 0."""
        lost = set(self.writers) - set(self.present)
        return bool(lost) and self._entries is not None and self._run.protection.step > self._newest

    def forget_lost(self) -> None:
        """Drop the logs of ranks that are gone. All ranks call it at the same time."""
        lost, self.writers = set(self.writers) - set(self.present), list(self.present)
        if not self._run.is_leader:
            return
        for seat, node in lost:
            try:
                self._session.sidecar.log_drop(name_of(seat), node=node)
            except CkptError as error:
                _log.warning("the log of %s cannot be removed: %s", seat, error)

    def append(self, key: str, data: bytes) -> None:
        """Add an entry of the present step: it is in this node's memory when this returns."""
        step = self._run.completed
        try:
            store = self._opened(step)
            self._release(store)
            end = store.log_append(self._name, split(key, data))
        except CkptError as error:
            self._store = None
            if isinstance(error, CapacityError) and not self._is_refused:
                _log.warning("completions are sampled without a log of them: %s", error)
                self._is_refused = True
            return
        self._steps.append((end, step))

    def _opened(self, step: int) -> LogStore:
        if self._store is None:
            self._store = store = self._session.sidecar
            # Records of an earlier process of this seat are as good as those of this step.
            self._steps = deque([(store.log_open(self._name), step)])
        return self._store

    def _release(self, store: LogStore) -> None:
        """Drop the records of steps that no restore goes back to."""
        protected, keep_from = self._run.protection.step, None
        while self._steps and self._steps[0][1] < protected:
            keep_from, _ = self._steps.popleft()
        if keep_from is not None:
            store.log_truncate(self._name, keep_from)


def _step_of(key: str) -> int:
    return int(key.partition("/")[0])


def writers_of(saved: Any) -> list[Writer]:
    """Return the writers that a saved state lists."""
    return [(str(seat), str(node)) for seat, node in saved]
