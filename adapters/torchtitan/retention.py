"""Removal of old steps behind the training."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from holdfast.adapters.shared.retention import keep_newest
from holdfast.ckpt.errors import CkptError

_log = logging.getLogger(__name__)


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
