"""Removal of old steps behind the training, by the rules of ``holdfast prune``."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from holdfast.ckpt.checkpoints import pins
from holdfast.ckpt.checkpoints.catalog import choose, committed
from holdfast.ckpt.checkpoints.retention import remove_steps
from holdfast.ckpt.checkpoints.retention_rules import PruneCandidate, Rules, judge
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.store.places import open_store

_log = logging.getLogger(__name__)


def keep_newest(root: str, keep_last: int, *, saved: int) -> list[int]:
    """Remove old steps, and return them: those before the newest ``keep_last`` up to ``saved``.

    Steps after ``saved``, of a run that went back to an earlier one, do not count, and stay. So do
    pinned steps, the newest that can be trusted, and directories that are not Holdfast's.
    """
    store = open_store(root)
    pinned = pins.load(store).pins
    candidates = [
        PruneCandidate(step=step, pinned=step in pinned)
        for step in committed(store)
        if step <= saved
    ]
    verdicts = judge(candidates, Rules(keep_last=keep_last), newest_verified=choose(root, None))
    going = [verdict.step for verdict in verdicts if not verdict.keep]
    remove_steps(store, going)
    return going


class Pruner:
    """Removes old steps in a thread of its own; a store that refuses costs a warning."""

    def __init__(self, root: str, *, keep_last: int) -> None:
        self._root, self._keep_last = root, keep_last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-prune")
        self._newest: Future[None] | None = None
        self._saved = 0

    def start(self, saved: int) -> None:
        """Begin a removal after a save, unless one waits already: that one will see it, too."""
        self._saved = saved
        waits = self._newest is not None and not (self._newest.running() or self._newest.done())
        if not waits:
            self._newest = self._thread.submit(self._run)

    def _run(self) -> None:
        try:
            if gone := keep_newest(self._root, self._keep_last, saved=self._saved):
                _log.info("removed the steps %s of %s", ", ".join(map(str, gone)), self._root)
        except CkptError as error:
            _log.warning("old steps of %s stay until the next save: %s", self._root, error)

    def close(self) -> None:
        """Wait for the removals."""
        self._thread.shutdown(wait=True)
