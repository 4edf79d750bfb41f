"""Choice of the way a loader's worker processes start, and the response to their failures."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from multiprocessing.context import BaseContext
from typing import Any

from holdfast.elastic.data.workers.feed import DataWorkerDiedError, DataWorkerStuckError
from holdfast.elastic.data.workers.startable import startable
from holdfast.elastic.data.workers.starter import StarterContext
from holdfast.elastic.errors import JobFailedError
from holdfast.elastic.events import DataWorkerDeath, DataWorkerHang, DataWorkersForked, LoaderEvent

_MAX_FAILURES = 3


class Starting:
    """The starts of one loader's workers; ``tell`` records an event.

    Unless the user chooses a method, they come from the starter. They are forked from the rank if
    their work cannot be sent to them, or if workers of the starter gave no batch. A starter that is
    needed begins at once, so that it is ready when samples are needed.
    """

    def __init__(
        self,
        dataset: Any,
        options: Mapping[str, Any],
        *,
        name: str,
        tell: Callable[[LoaderEvent], None],
    ) -> None:
        self._name, self._tell, self._failures = name, tell, 0
        context: BaseContext | str | None = options.get("multiprocessing_context")
        self._context = context or _asked_of_all()
        self._why_forked, self._imports_main = "", False
        if not options.get("num_workers") or self._context:
            return
        found = startable((dataset, options.get("worker_init_fn"), options.get("collate_fn")))
        self._why_forked, self._imports_main = found.why, found.imports_main
        if not found.why:
            StarterContext(imports_main=found.imports_main).run()

    def context(self) -> BaseContext | str:
        """Return the present method of starting them."""
        if self._context:
            return self._context
        if not self._why_forked:
            return StarterContext(imports_main=self._imports_main)
        self._tell(DataWorkersForked(loader=self._name, why=self._why_forked))
        return "fork"

    @property
    def patience(self) -> int:
        """Factor of the time limit for a first batch; it doubles after each failure."""
        return 1 << self._failures

    def worked(self) -> None:
        """Note that a batch has come."""
        self._failures = 0

    def failed(self, died: DataWorkerDiedError, *, gave: int) -> None:
        """Note that they died after ``gave`` batches; next time they may be forked.

        Raises ``JobFailedError`` after too many failures.
        """
        self._failures += 1
        stuck = isinstance(died, DataWorkerStuckError)
        kind = DataWorkerHang if stuck else DataWorkerDeath
        self._tell(kind(loader=self._name, how=str(died), times=self._failures))
        if not gave:
            self._why_forked = f"nothing came of those that were not: {died}"
        if self._failures < _MAX_FAILURES:
            return
        what = "were stuck" if stuck else "died"
        remedy = "look at the node's memory and at /dev/shm, or lower num_workers"
        if stuck:
            remedy = "if its first samples take so long, give run.loader(first_batch_s=...)"
        raise JobFailedError(
            f"loader {self._name!r}: its worker processes {what} {self._failures} times before "
            f"one batch was there, the last by {died}; {remedy}"
        ) from died


def _asked_of_all() -> str | None:
    """Return the script's start method for all processes, None if it leaves that to Python."""
    method = multiprocessing.get_start_method(allow_none=True)
    return None if method in (None, "fork") else method
