"""The starter: a process with one thread that forks the worker processes that load data.

A rank has many threads: its agent's channel, copies of snapshots, collectives. A process forked
from it inherits every lock that they hold at that moment, and no thread to release it. So each rank
has a *starter*, which has loaded torch, and the script if that can be imported, and forks on
request. It is like multiprocessing's fork server, with other lifelines: the kernel kills it with
its rank, and the workers with it from their first instruction on. It uses no named resources.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import context, forkserver, popen_forkserver, process, reduction, spawn, util
from multiprocessing.connection import wait
from typing import Any, NoReturn

from holdfast.elastic.data.workers.pipes import Flag, PipeQueue
from holdfast.elastic.processes.children import Child

MAX_FDS = 200
"""Largest number of descriptors at a worker's start; the kernel sends 253 at once."""

_PR_SET_PDEATHSIG = 1
_MAIN = ("init_main_from_name", "init_main_from_path")
_SHARED = ("sys_path", "sys_argv", "dir", "orig_dir", *_MAIN)
_CODE = """import sys; sys.path[:] = {path!r}
import holdfast.elastic.data.streams, holdfast.elastic.data.workers.feed
from holdfast.elastic.data.workers.starter import serve; serve({fd}, {preparation!r})"""


_tied = False


def is_tied() -> bool:
    """Return whether this is a worker forked by a starter; the kernel ends it with its rank."""
    return _tied


def tie(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends; exit if it has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Starter:
    """This rank's starter, running or not; it stays from one generation to the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._socket: socket.socket | None = None

    def run(self, *, imports_main: bool) -> None:
        """Start it if needed, without waiting until it is ready.

        It lives as long as this thread.
        """
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._close()
                self._run(imports_main)

    def _run(self, imports_main: bool) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        preparation = {
            key: value for key, value in _preparation("starter").items() if key in _SHARED
        }
        if not imports_main:
            preparation = _without_main(preparation)
        code = _CODE.format(
            path=preparation["sys_path"],
            fd=theirs.fileno(),
            preparation=json.dumps(preparation),
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            # The starter would start BLAS threads too: harmless, but useless.
            env = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
            argv = [sys.executable, *flags, "-c", code]
            self._child = Child.start(argv, env=env, tied=True, pass_fds=(theirs.fileno(),))
        self._socket = ours
        atexit.register(self.end)

    def start(self, fds: list[int]) -> tuple[int, int]:
        """Request a worker with copies of ``fds``; it starts once the starter is ready.

        Returns a descriptor from which to read its process id and its exit status, and one to which
        to write its work. Raises ``OSError`` if the starter has ended.
        """
        status, its_status = os.pipe()
        its_orders, orders = os.pipe()
        try:
            with self._lock:
                if self._socket is None:
                    raise BrokenPipeError("the process that starts workers has ended")
                socket.send_fds(self._socket, [b"\0"], [its_orders, its_status, *fds])
        except BaseException:
            os.close(status)
            os.close(orders)
            raise
        finally:
            os.close(its_orders)
            os.close(its_status)
        return status, orders

    @property
    def pid(self) -> int:
        """Its process id, 0 while it does not run."""
        return self._child.pid if self._child is not None and self._child.alive else 0

    def end(self) -> None:
        """Kill it and every worker that it forked."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        atexit.unregister(self.end)
        if self._child is not None:
            self._child.kill()
            self._child.wait(1.0)
        if self._socket is not None:
            self._socket.close()
        self._child = self._socket = None


STARTER = Starter()
"""The starter of this process."""


class _Popen(popen_forkserver.Popen):
    """A worker process, as multiprocessing sees it."""

    def __init__(self, process_obj: WorkerProcess) -> None:
        self._polling = threading.Lock()
        super().__init__(process_obj)

    def _launch(self, process_obj: WorkerProcess) -> None:
        orders = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(_preparation(process_obj.name, main=process_obj.imports_main), orders)
            reduction.dump(process_obj, orders)
        finally:
            context.set_spawning_popen(None)
        fds: list[int] = self._fds  # type: ignore[attr-defined]
        self.sentinel, pipe = STARTER.start(fds)
        kept = os.dup(pipe)  # its end tells parent_process() in the worker that the rank is gone
        self.finalizer = util.Finalize(self, _close_all, (kept, self.sentinel))
        with open(pipe, "wb") as file:  # noqa: PTH123 - a descriptor
            file.write(orders.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit status once there is one; callable from any thread."""
        with self._polling:
            return super().poll(flag)


class WorkerProcess(context.ForkServerProcess):
    """A process that the starter forks; it imports the script only where ``imports_main``."""

    imports_main = False

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


class StarterContext(context.ForkServerContext):
    """A DataLoader's ``multiprocessing_context`` that gets its workers from the starter.

    With ``imports_main`` the workers import the script, for classes and functions defined there.
    """

    def __init__(self, *, imports_main: bool) -> None:
        super().__init__()
        self._imports_main = imports_main
        self._queues: list[PipeQueue] = []

    def run(self) -> None:
        """Start the starter if needed; see `Starter.run`."""
        STARTER.run(imports_main=self._imports_main)

    def Process(self, *args: Any, **options: Any) -> WorkerProcess:  # type: ignore[override]
        """Return a process that is not started yet."""
        made = WorkerProcess(*args, **options)
        made.imports_main = self._imports_main
        return made

    def Queue(self, maxsize: int = 0) -> Any:
        """Return a queue; ``maxsize`` is ignored."""
        made = PipeQueue()
        self._queues.append(made)
        return made

    def Event(self) -> Any:
        """Return a flag."""
        return Flag()

    def shut(self) -> None:
        """Release every thread that waits at a queue."""
        for each in self._queues:
            each.shut()


def _close_all(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _preparation(name: str, *, main: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = spawn.get_preparation_data(name)
    return found if main else _without_main(found)


def _without_main(preparation: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in preparation.items() if key not in _MAIN}


def serve(fd: int, preparation: str) -> None:
    """Run as a starter until the rank is gone."""
    _load(json.loads(preparation))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _Server(socket.socket(fileno=fd)).run()


def _load(preparation: dict[str, Any]) -> None:
    """Import the script, once for all workers; `_CODE` has imported Holdfast's modules for them."""
    process.current_process()._inheriting = True  # type: ignore[attr-defined]
    try:
        spawn.prepare(preparation)
    except Exception:  # noqa: BLE001 - a script may raise anything; a worker that needs it says so
        pass
    finally:
        del process.current_process()._inheriting  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # so that garbage collection does not copy these pages in every worker


class _Server:
    """The starter's side: forks on request, and reports each worker's exit status."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake)
        self._status: dict[int, int] = {}

    def run(self) -> None:
        """Serve until the rank is gone."""
        while True:
            ready = wait([self._requests, self._woken])
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 1 << 16)
                self._reap()
            if self._requests in ready:
                message, fds, _, _ = socket.recv_fds(self._requests, 1, MAX_FDS + 2)
                if not message:
                    return
                self._fork(*fds)

    def _fork(self, orders: int, status: int, *fds: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            self._work(parent, orders, status, fds=fds)
        _tell(status, pid)
        self._status[pid] = status
        for each in (orders, *fds):
            os.close(each)

    def _work(self, parent: int, orders: int, status: int, *, fds: Sequence[int]) -> NoReturn:
        global _tied  # noqa: PLW0603 - a property of the process
        code = 1
        try:
            tie(parent)
            _tied = True
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._requests.close()
            for each in (self._woken, self._wake, status, *self._status.values()):
                os.close(each)
            forkserver._forkserver._inherited_fds = list(fds)  # type: ignore[attr-defined]
            code = spawn._main(orders, os.dup(orders))
        except Exception:  # noqa: BLE001 - the main of a process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if (status_fd := self._status.pop(pid, None)) is not None:
                _tell(status_fd, os.waitstatus_to_exitcode(status))
                os.close(status_fd)


def _tell(fd: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the rank has dropped this worker
        forkserver.write_signed(fd, number)
