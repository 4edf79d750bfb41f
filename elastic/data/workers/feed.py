"""Feed of batches from a DataLoader, with interruptible waits and replaceable workers.

A thread starts and reads a DataLoader with worker processes, so the caller can check the fence
while it waits. Worker processes die with the rank and are killed when the feed is closed. torch's
own watch over them, which raises at any point of the main thread, is removed: the feed detects a
death when a batch is waited for. It also detects a worker that hangs before its first batch, for
example because it was forked with a lock that no thread releases.
"""

from __future__ import annotations

import copy
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from holdfast.ckpt import torch_private
from holdfast.ckpt.errors import InternalError
from holdfast.elastic.data.workers.starter import STARTER, StarterContext, is_tied, tie
from holdfast.elastic.groups.waits import leave_behind
from holdfast.elastic.processes.children import describe_exit

FIRST_BATCH_S = 60.0
"""A worker process that gives no batch for this long after its start counts as stuck."""

_POLL_S = 0.004
_PUT_S = 0.1
_DEATH_GRACE_S = 0.5


class DataWorkerDiedError(InternalError):
    """A process that loads data ended by itself: what it had not delivered is to be asked again."""


class DataWorkerStuckError(DataWorkerDiedError):
    """A process that loads data gave nothing after its start, and was killed: as if it had died."""


class WorkerStart:
    """First work of a worker process: tie itself to the rank, then call the user's function."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._rank, self._then = os.getpid(), then

    def __call__(self, worker: int) -> None:
        """Do so in worker number ``worker``."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the rank's own handler is inherited
        if os.getppid() == self._rank:
            tie(self._rank)
        elif not is_tied():  # the child of multiprocessing's fork server, which outlives the rank
            threading.Thread(target=_follow, name="rank", daemon=True).start()
        if self._then is not None:
            self._then(worker)


def _follow() -> None:
    if rank := parent_process():
        wait([rank.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


class Feed:
    """The batches of one pass over a DataLoader, in order.

    ``first_batch_s`` is the time limit of its worker processes for their first batches.
    """

    def __init__(self, loader: DataLoader[Any], *, first_batch_s: float = FIRST_BATCH_S) -> None:
        self._loader, self._first_batch_s = loader, first_batch_s
        self._workers = loader.num_workers
        self._started: list[BaseProcess] = []
        self._closed, self._running = threading.Event(), threading.Event()
        self._ready: queue.Queue[tuple[bool, Any]] = queue.Queue(maxsize=1)
        self._got, self._since_s = 0, time.monotonic()
        if not self._workers:
            self._iterator: Any = iter(loader)
            return
        self._context = loader.multiprocessing_context
        if isinstance(self._context, StarterContext):
            self._context.run()  # by this thread: the starter ends with it
        loader.multiprocessing_context = self._recording(self._context or get_context())
        reader = threading.Thread(target=self._read, name="data", daemon=True)
        leave_behind(reader)  # it may be making tensors when the rank ends
        reader.start()

    def _recording(self, context: BaseContext) -> BaseContext:
        """Return a copy of the context that records the processes it makes."""
        noting: Any = copy.copy(context)
        make = noting.Process

        def process(*args: Any, **options: Any) -> BaseProcess:
            made: BaseProcess = make(*args, **options)
            self._started.append(made)
            return made

        noting.Process = process
        found: BaseContext = noting
        return found

    def _read(self) -> None:
        """Start the workers and hand over their batches.

        The thread stays until the feed is closed, because a forked worker ends with the thread that
        forked it.
        """
        try:
            iterator = iter(self._loader)
        except (OSError, EOFError) as error:
            self._hand_over((False, DataWorkerDiedError(f"it could not be started: {_why(error)}")))
        except Exception as error:  # noqa: BLE001 - raised again by the waiting thread
            self._hand_over((False, error))
        else:
            torch_private.unwatch_workers(iterator)
            self._running.set()
            while not self._closed.is_set() and self._hand_over(_next(iterator)):
                pass
        self._closed.wait()
        self._kill()  # one may have been started while the feed was closed

    def _hand_over(self, item: tuple[bool, Any]) -> bool:
        """Hand over an item; return whether more follow."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=_PUT_S)
            except queue.Full:
                continue
            return item[0]
        return False

    def get(self, check: Callable[[], None], *, beat: Callable[[], None] = lambda: None) -> Any:
        """Return the next batch; ``check`` is called while waiting and may raise to leave.

        ``beat`` is called as well while the wait is bounded here. Raises ``DataWorkerDiedError`` if
        a worker process is gone or stuck, and the errors of the data set.
        """
        if not self._workers:
            return next(self._iterator)
        while True:
            try:
                good, item = self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                check()
                if self._ready.empty():
                    self._look(beat)
                continue
            if good:
                self._got, self._since_s = self._got + 1, time.monotonic()
                return item
            if not isinstance(item, DataWorkerDiedError) and (died := self._died(_DEATH_GRACE_S)):
                raise DataWorkerDiedError(died) from item
            raise item

    def _look(self, beat: Callable[[], None]) -> None:
        """Raise if a worker has died, or its first batch is overdue."""
        if died := self._died():
            raise DataWorkerDiedError(died)
        if self._got >= self._workers:
            return
        beat()
        if time.monotonic() - self._since_s <= self._first_batch_s:
            return
        late = f"it gave nothing for {self._first_batch_s:g} s after its start"
        if not self._running.is_set() and isinstance(self._context, StarterContext):
            STARTER.end()  # it may be stuck itself
        pids = self.pids()
        who = pids[self._got] if self._got < len(pids) else "not started"
        raise DataWorkerStuckError(f"{late} (process {who})")

    def _died(self, wait_s: float = 0.0) -> str:
        """Describe a worker process that ended, "" for none; an error may precede its end."""
        deadline = time.monotonic() + wait_s
        while True:
            for process in tuple(self._started):
                if process.exitcode:
                    return f"{describe_exit(process.exitcode)} (process {process.pid})"
            if time.monotonic() >= deadline:
                return ""
            time.sleep(_POLL_S)

    @property
    def gave(self) -> int:
        """The number of batches received."""
        return self._got

    def pids(self) -> tuple[int, ...]:
        """Return the ids of the worker processes; none if the rank reads by itself."""
        return tuple(process.pid for process in tuple(self._started) if process.pid)

    def close(self) -> None:
        """End the worker processes at once; drop the batches that they prepared."""
        self._closed.set()
        self._kill()
        for process in tuple(self._started):
            if process.pid:
                process.join(timeout=_DEATH_GRACE_S)
        if not self._workers:
            self._iterator = None
        elif isinstance(self._context, StarterContext):
            self._context.shut()

    def _kill(self) -> None:
        for process in tuple(self._started):
            if process.pid and process.exitcode is None:
                process.kill()


def _next(iterator: Any) -> tuple[bool, Any]:
    try:
        return True, next(iterator)
    except StopIteration:
        return False, IndexError("the DataLoader has no more batches")
    except Exception as error:  # noqa: BLE001 - raised again by the waiting thread
        return False, error


def _why(error: OSError | EOFError) -> str:
    """Return the system's message, with a remedy if it names none."""
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return f"{error.strerror}: set TMPDIR to a directory that can be written"
    if "AF_UNIX path too long" not in str(error):
        return str(error)
    return (
        f"{error}: a fork server's socket lies below {tempfile.gettempdir()}; set a shorter TMPDIR"
    )
