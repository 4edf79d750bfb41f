"""The CUDA half of a generation's groups: NCCL, whose communicators are aborted at the fence.

A collective on a device does not block the CPU: a wait for it orders streams. The device blocks, in
a kernel that waits for a peer, and then any CPU thread that waits for the device. Both end when the
communicator is aborted. So a thread checks the fence of every living group and aborts fenced ones.
An aborted collective leaves useless values in its buffers and raises no error. So code that reads
results from the device checks the fence after the device is done (`settle`); the fence is always
there before the abort.

Unlike gloo's, the buffers need not be kept: a stream that waits for a collective reuses its memory
only after it, and torch holds the tensors of collectives that were not waited for.

Written against torch 2.13 and not yet run on a device.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch.distributed import Work

from holdfast.ckpt import torch_private
from holdfast.ckpt.torch_private import PrefixStore, Store
from holdfast.elastic.groups.waits import POLL_S, WaitGuard, leave_behind

WATCHDOG: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Settings that keep torch's own watchdog from ending the process, as it does by default.

The first disables the response to a lost peer or a late collective (3, the default, ends the
process). The second turns off the thread that ends the process if the watchdog hangs, which can
happen while a communicator is aborted.
"""

_SETTLE_POLL_S: Final = 0.0002

_ENQUEUE_GRACE_S: Final = 0.5
"""Time that an abort waits for a call that enqueues an operation; such a call takes microseconds.

A call that takes longer waits for the device itself, and only the abort frees it.
"""

_CONNECTING: Final = frozenset({"send", "recv", "recv_anysource"})
"""Operations whose first call makes a communicator of two ranks; it blocks until both are there."""


class Communicator(Protocol):
    """The part of ``ProcessGroupNCCL`` used here, besides its operations."""

    def abort(self) -> None:
        """End the running kernels and free the communicators."""

    def shutdown(self) -> None:
        """Let the running kernels finish, and free the communicators."""


class NcclWork(Work):
    """An NCCL operation: its wait orders streams, and raises when the generation is over."""

    def __init__(self, inner: Work, guard: WaitGuard) -> None:
        super().__init__()
        self._inner, self._guard = inner, guard

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait; with a timeout also the CPU."""
        self._guard.check()
        try:
            if timeout:
                self._inner.wait(timeout)
            else:
                self._inner.wait()
        except RuntimeError as error:
            self._guard.reraise(error)
        self._guard.check()
        return True

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the device is done with it."""
        return self._inner.is_completed()

    def is_success(self) -> bool:
        """Return whether it completed without an error, in a generation that is not over."""
        return self._inner.is_success() and not self._guard.fenced

    def get_future(self) -> Any:
        """Return a future of the operation."""
        return self._inner.get_future()

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        self.wait()
        return self._inner.result()


class NcclGroup:
    """NCCL among the ranks of a group, under a `WaitGuard`. Made by `connect`."""

    def __init__(self, nccl: Communicator, *, guard: WaitGuard) -> None:
        self._nccl, self.guard = nccl, guard
        self._lock, self._enqueuing = threading.Lock(), threading.Lock()
        self._ending: threading.Thread | None = None

    def start(self, name: str, *args: Any, **kwargs: Any) -> Work:
        """Start an operation. Raises ``GenerationOverError`` if the generation is over."""
        self.guard.check()
        operation = functools.partial(getattr(self._nccl, name), *args, **kwargs)
        enqueue = functools.partial(self._enqueue, operation)
        if name in _CONNECTING:
            return NcclWork(self.guard.call(_in_this_stream(enqueue), name=name), self.guard)
        try:
            return NcclWork(enqueue(), self.guard)
        except RuntimeError as error:
            self.guard.reraise(error)

    def _enqueue(self, operation: Callable[[], Work]) -> Work:
        with self._enqueuing:  # an abort frees what the call uses
            self.guard.check()
            return operation()

    @property
    def busy(self) -> bool:
        """True if its communicators are still being freed."""
        return self._ending is not None and self._ending.is_alive()

    def close(self) -> None:
        """Free the communicators; if the generation is over, without waiting for other ranks."""
        _watcher.forget(self)
        self._end(self._abort if self.guard.fenced else self._nccl.shutdown)

    def abort(self) -> None:
        """End the running operations after the fence; a second call does nothing."""
        self._end(self._abort)

    def _abort(self) -> None:
        alone = self._enqueuing.acquire(timeout=_ENQUEUE_GRACE_S)
        try:
            self._nccl.abort()
        finally:
            if alone:
                self._enqueuing.release()

    def _end(self, how: Callable[[], None]) -> None:
        """Start ``how`` once, in a thread of its own.

        One abort may wait for another: a kernel of this group can be queued behind one of another.
        """
        with self._lock:
            if self._ending is not None:
                return
            self._ending = threading.Thread(target=how, name="end-nccl", daemon=True)
            self._ending.start()
            leave_behind(self._ending)


class Watcher:
    """A thread that aborts groups at the fence; it runs only while there are groups to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: list[NcclGroup] = []
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """True if the thread runs."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def watch(self, group: NcclGroup) -> None:
        """Abort ``group`` as soon as its generation is over."""
        with self._lock:
            self._groups.append(group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watch-nccl", daemon=True)
                self._thread.start()

    def forget(self, group: NcclGroup) -> None:
        """Stop watching ``group``."""
        with self._lock:
            self._groups = [each for each in self._groups if each is not group]

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._groups:
                    self._thread = None
                    return
                over = [group for group in self._groups if group.guard.fenced]
                self._groups = [group for group in self._groups if group not in over]
            for group in over:
                group.abort()
            time.sleep(POLL_S)


_watcher = Watcher()


def tame(environment: MutableMapping[str, str]) -> None:
    """Apply the settings of `WATCHDOG`, unless the user has set them."""
    for name, value in WATCHDOG.items():
        environment.setdefault(name, value)


def connect(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    guard: WaitGuard,
    *,
    device: torch.device,
) -> NcclGroup:
    """Make the ranks' communicator on ``device``.

    Raises ``GenerationOverError`` if the generation is over. NCCL blocks until all ranks have come.
    So it connects here and not in the first collective, which no fence could interrupt. A thread
    that is left behind in it ends when its peers end.
    """
    tame(os.environ)  # torch reads these when it makes the group
    from torch.distributed import ProcessGroupNCCL  # missing in a build for CPUs

    def form() -> Any:
        torch.cuda.set_device(device)  # a thread's own
        options = ProcessGroupNCCL.Options()
        torch_private.set_timeout(options, timeout)
        options.config.blocking = 1  # a non-blocking one holds up its own abort while it forms
        nccl = ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
        nccl.eager_connect_single_device(device)
        return nccl

    group = NcclGroup(guard.call(form, name="form-nccl"), guard=guard)
    _watcher.watch(group)
    return group


class Marker(Protocol):
    """The part of ``torch.cuda.Event`` used here."""

    def query(self) -> bool:
        """Return whether the device has reached this mark."""


def settle(mark: Marker, guard: WaitGuard, *, timeout_s: float) -> None:
    """Wait until the device has reached ``mark``; then its results are complete.

    Raises ``GenerationOverError`` if the generation is over, ``TimeoutError`` after ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    with guard.wait():
        while not mark.query():
            guard.check()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the device has not finished the step after {timeout_s:g} s")
            time.sleep(_SETTLE_POLL_S)
    guard.check()


def _in_this_stream(operation: Callable[[], Work]) -> Callable[[], Work]:
    """Return ``operation`` for another thread, bound to the current device and stream."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return operation
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()

    def run() -> Work:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return operation()

    return run
