"""The CUDA half of a generation's groups: NCCL, whose communicators are aborted at the fence.

A collective on a device does not block the CPU: a wait for it orders streams. The device blocks, in
a kernel that waits for a peer, and then any CPU thread that waits for the device. Both end when the
communicator is aborted. So a thread checks the fence of every living group and aborts fenced ones.
An aborted collective leaves useless values in its buffers and raises no error. So code that reads
results from the device checks the fence after the device is done (`settle`); the fence is always
there before the abort.

Unlike gloo's, the buffers need not be kept: a stream that waits for a collective reuses its memory
only after it, and torch holds the tensors of collectives that were not waited for. A collective
that the caller does not start asynchronously runs in the caller's own stream, and torch returns
nothing for it.

Written against torch 2.13 and not yet run on a device. docs/explanation/cuda.md says where torch's
source shows what is said here.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch.distributed import Work

from holdfast.ckpt import torch_private
from holdfast.ckpt.snapshot import lanes
from holdfast.ckpt.torch_private import PrefixStore, Store
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.waits import POLL_S, WaitGuard, leave_behind
from holdfast.elastic.meeting.connecting import ConnectingStore

_log = logging.getLogger(__name__)

WATCHDOG: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Settings that keep torch's own watchdog from ending the process or holding it up, as it does by
default.

The first disables the response to a lost peer or a late collective (3, the default, ends the
process). The second turns off the thread that ends the process if the watchdog hangs, which can
happen while a communicator is aborted. After an error the watchdog sleeps for four times the third,
a minute by default, and holds a lock meanwhile which every collective of its group takes.
"""

_DEBUGGED: Final = {"TORCH_NCCL_DESYNC_DEBUG": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
"""Settings with which torch takes the first one of `WATCHDOG` for 3, although it is 0."""

_SETTLE_POLL_S: Final = 0.0002

_ENQUEUE_GRACE_S: Final = 0.5
"""Time that an abort waits for a call that enqueues an operation; such a call takes microseconds.

A call that takes longer waits for the device itself, and only the abort frees it.
"""

_CONNECTING: Final = frozenset({"send", "recv", "recv_anysource"})
"""Operations whose first call connects two ranks; it blocks until both are there."""


class Communicator(Protocol):
    """The part of ``ProcessGroupNCCL`` used here, besides its operations."""

    def abort(self) -> None:
        """End the running kernels and free the communicators."""

    def shutdown(self) -> None:
        """Let the running kernels finish, and free the communicators."""


class Marker(Protocol):
    """The part of ``torch.cuda.Event`` used here."""

    def query(self) -> bool:
        """Return whether the device has reached this mark."""


class NcclWork(Work):
    """An NCCL operation: its wait orders streams, and raises when the generation is over.

    ``inner`` is None for one in the stream of the caller, whose next work comes after it anyway:
    ``outputs`` are its tensors, and ``mark`` its end in that stream.
    """

    def __init__(
        self,
        inner: Work | None,
        guard: WaitGuard,
        *,
        outputs: Sequence[torch.Tensor] = (),
        mark: Marker | None = None,
    ) -> None:
        super().__init__()
        self._inner, self._guard = inner, guard
        self._outputs, self._mark = list(outputs), mark

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait; with a timeout also the CPU."""
        self._guard.check()
        if self._inner is None:
            if timeout and self._mark is not None:
                settle([self._mark], self._guard, timeout_s=timeout.total_seconds())
            return True
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
        if self._inner is None:
            return self._mark is None or self._mark.query()
        return self._inner.is_completed()

    def is_success(self) -> bool:
        """Return whether it completed without an error, in a generation that is not over.

        torch's own operation refuses that question.
        """
        failed = self._inner is not None and self._inner.exception() is not None
        return self.is_completed() and not failed and not self._guard.fenced

    def get_future(self) -> Any:
        """Return a future of the operation."""
        if self._inner is not None:
            return self._inner.get_future()
        devices = {tensor.device for tensor in self._outputs if tensor.is_cuda}
        future: Any = torch.futures.Future(devices=sorted(devices, key=str))
        future.set_result(self._outputs)  # for who reads it, the stream is ordered
        return future

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        self.wait()
        return self._outputs if self._inner is None else self._inner.result()


class NcclGroup:
    """NCCL among the ranks of a group, under a `WaitGuard`. Made by `connect`.

    ``store`` is the group's, which must live as long as the group does.
    """

    def __init__(self, nccl: Communicator, *, guard: WaitGuard, store: Store | None = None) -> None:
        self._nccl, self.guard, self._store = nccl, guard, store
        self._lock, self._enqueuing = threading.Lock(), threading.Lock()
        self._ending: threading.Thread | None = None

    def start(self, name: str, *args: Any, **kwargs: Any) -> Work:
        """Start an operation.

        Raises ``GenerationOverError`` if the generation is over, and ``ConfigError`` while a CUDA
        graph is captured.
        """
        self.guard.check()
        if lanes.is_captured():
            raise ConfigError(
                f"{name} among the ranks is captured into a CUDA graph: a replay after a change of "
                "the ranks would use a communicator that no longer exists; capture only work that "
                "needs no other rank, or train without the graph"
            )
        operation = functools.partial(getattr(self._nccl, name), *args, **kwargs)
        enqueue = functools.partial(self._enqueue, operation)
        if name in _CONNECTING:
            return self._work(self.guard.call(_in_this_stream(enqueue), name=name), args)
        try:
            return self._work(enqueue(), args)
        except RuntimeError as error:
            self.guard.reraise(error)

    def _work(self, inner: Work | None, args: Sequence[Any]) -> NcclWork:
        if inner is not None:
            return NcclWork(inner, self.guard)
        outputs = list(_tensors(args[:1]))
        return NcclWork(None, self.guard, outputs=outputs, mark=_mark(outputs))

    def _enqueue(self, operation: Callable[[], Work | None]) -> Work | None:
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
            run = functools.partial(_end_quietly, how)
            self._ending = threading.Thread(target=run, name="end-nccl", daemon=True)
            self._ending.start()
            leave_behind(self._ending)


def _end_quietly(how: Callable[[], None]) -> None:
    """Call ``how``; an error there is no error of the training: the group is over."""
    try:
        how()
    except RuntimeError as error:
        _log.warning("a communicator was not freed as it should: %s", error)


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


def untamed(environment: Mapping[str, str]) -> str:
    """Return by which of the user's settings torch ends or holds up this process, or ""."""
    found = [
        f"{name}={environment[name]}"
        for name, value in WATCHDOG.items()
        if environment.get(name, value) != value
    ]
    found += [
        f"{name}={environment[name]}"
        for name, value in _DEBUGGED.items()
        if environment.get(name, "").upper() == value
    ]
    if not found:
        return ""
    return (
        f"{' and '.join(found)}: with that, torch may end this process, or hold it up for a "
        "minute, when a peer is lost, where Holdfast would go on in it; unset it"
    )


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


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
    if text := untamed(os.environ):
        _warn_once(text)
    from torch.distributed import ProcessGroupNCCL  # missing in a build for CPUs

    connecting = ConnectingStore(store)

    def form() -> Any:
        torch.cuda.set_device(device)  # a thread's own
        options = ProcessGroupNCCL.Options()
        torch_private.set_timeout(options, timeout)
        options.config.blocking = 1  # a non-blocking one holds up its own abort while it forms
        nccl = ProcessGroupNCCL(PrefixStore("nccl", connecting), rank, size, options)
        nccl.eager_connect_single_device(device)
        connecting.leave()
        return nccl

    group = NcclGroup(guard.call(form, name="form-nccl"), guard=guard, store=connecting)
    _watcher.watch(group)
    return group


def settle(marks: Sequence[Marker], guard: WaitGuard, *, timeout_s: float) -> None:
    """Wait until the device has reached all ``marks``; then its results are complete.

    Raises ``GenerationOverError`` if the generation is over, ``TimeoutError`` after ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    with guard.wait():
        while not all(mark.query() for mark in marks):
            guard.check()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the device has not finished the step after {timeout_s:g} s")
            time.sleep(_SETTLE_POLL_S)
    guard.check()


def _mark(tensors: Sequence[torch.Tensor]) -> Marker | None:
    """Mark the position of the current stream of the device with the tensors."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    event: Marker = torch.cuda.current_stream(device).record_event()
    return event


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _in_this_stream(operation: Callable[[], Work | None]) -> Callable[[], Work | None]:
    """Return ``operation`` for another thread, bound to the current device and stream."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return operation
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()

    def run() -> Work | None:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return operation()

    return run
