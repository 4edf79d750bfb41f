"""Child processes: started, watched and ended so that none outlives its parent."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Protocol

from holdfast.ckpt.descriptors import patiently, readable
from holdfast.elastic.processes.output import OutputCopy

# Runs between fork and the real program, in a fresh interpreter instead of a preexec_fn, because
# Python code between fork and exec is unsafe in a process with threads. PR_SET_PDEATHSIG is 1; if
# the parent died before the call, getppid() returns another process.
_TIE = (
    "import ctypes,os,sys;"
    "ctypes.CDLL(None).prctl(1,9);"
    "os.getppid()==int(sys.argv[1]) or os._exit(137);"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)
_EXEC_LOOKS, _EXEC_LOOK_S = 50, 0.002
_END_LOOK_S = 0.005
_LAST_WORDS_S = 1.0


class ChildChange(Enum):
    """A change of a child's state."""

    EXITED = "exited"
    STOPPED = "stopped"
    CONTINUED = "continued"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildStatus:
    """A change of a child's state; ``code`` is as in ``Popen.returncode`` if it exited."""

    change: ChildChange
    code: int = 0


def describe_exit(code: int) -> str:
    """Return ``"exit status 3"`` or ``"killed by SIGKILL"``."""
    if code >= 0:
        return f"exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}"


class Process(Protocol):
    """A child process as far as `Child` needs it."""

    pid: int

    def wait(self) -> int:
        """Wait until it has ended, and reap it; return its exit status as ``Popen`` does."""


class Child:
    """A child process in a session of its own; its whole process group ends with it."""

    def __init__(self, process: Process, *, copy: OutputCopy | None = None) -> None:
        self._process, self._copy = process, copy
        self.pid = process.pid
        self.code: int | None = None
        self._ending = threading.Lock()
        self._foretold: int | None = None
        self._gone = threading.Event()

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        tied: bool,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        output: Path | None = None,
        copied: bool = False,
        stamped: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start ``argv``; with ``tied`` the kernel kills it when the calling thread ends.

        ``output`` is a file to which both output streams are appended; None: inherited. With
        ``copied`` a full disk costs output, where it otherwise raises in the child; ``stamped`` as
        in `OutputCopy`. Raises ``OSError`` if there is no such program.
        """
        if tied:
            argv = [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *argv]

        def popen(log: int | None) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                argv,
                env=dict(env),
                stdin=stdin,
                stdout=log,
                stderr=log,
                pass_fds=pass_fds,
                start_new_session=True,
            )

        def start() -> Child:
            if output is None or copied:
                return cls.begun(popen, output=output, stamped=stamped)
            log = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                return cls(popen(log))
            finally:
                os.close(log)

        return patiently(start)

    @classmethod
    def begun(
        cls,
        begin: Callable[[int | None], Process],
        *,
        output: Path | None,
        stamped: bool = False,
    ) -> Child:
        """Return the child that ``begin`` starts, in a session of its own.

        ``begin`` takes the descriptor for both output streams, whose bytes are copied to
        ``output``, ``stamped`` as in `OutputCopy`; None: inherited. Raises what ``begin`` raises.
        """
        if output is None:
            return cls(begin(None))
        copy = OutputCopy(output, stamped=stamped)
        try:
            child = cls(begin(copy.fd), copy=copy)
        except OSError:
            copy.release()
            raise
        copy.begin()
        return child

    def poll(self) -> ChildStatus | None:
        """Return the next change of state not yet seen, or None. Never blocks."""
        if self.code is not None:
            return None
        if self._foretold is not None:
            return ChildStatus(
                change=ChildChange.EXITED, code=self._end_as_foretold(self._foretold)
            )
        flags = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        try:
            changed = os.waitid(os.P_PID, self.pid, flags | os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # foretold and buried in this moment
            return self.poll()
        if changed is None:
            return None
        if changed.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
            return ChildStatus(change=ChildChange.EXITED, code=self._reap())
        with contextlib.suppress(ChildProcessError):  # likewise; the next poll returns it
            os.waitid(os.P_PID, self.pid, flags)
        stopped = changed.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED)
        return ChildStatus(change=ChildChange.STOPPED if stopped else ChildChange.CONTINUED)

    def foretell(self, code: int) -> None:
        """Make `poll` report its exit, although the kernel is still freeing its memory.

        The caller must know that none of its threads will run again (`lifelock.wait_status`).
        """
        self._foretold = code

    def bury(self) -> None:
        """Wait until the kernel is done with it, and reap it; safe in another thread."""
        with contextlib.suppress(ChildProcessError):  # reaped already
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.kill()  # the rest of its group, while the number is its own
        with self._ending:
            self._process.wait()
            self._gone.set()

    def _end_as_foretold(self, code: int) -> int:
        if self.code is None:
            self.kill()
            self.code = code
        return self.code

    def _reap(self) -> int:
        self.kill()  # the rest of its group; the number is its own until it is reaped
        with self._ending:
            self.code = self._process.wait()
        if self._copy is not None:
            self._copy.finish(_LAST_WORDS_S)
        return self.code

    @property
    def alive(self) -> bool:
        """True if it has not been seen to exit."""
        return self.code is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its group; does nothing once it was reaped.

        SIGTERM goes only to the process, which ends its own children in order.
        """
        send = os.kill if number == signal.SIGTERM else os.killpg
        with self._ending, contextlib.suppress(ProcessLookupError):
            if self.code is None and not self._gone.is_set():
                send(self.pid, number)

    def kill(self) -> None:
        """SIGKILL it and its group."""
        self.signal(signal.SIGKILL)

    def await_end(self, timeout_s: float) -> bool:
        """Wait until it will not run again; the kernel may still be freeing its memory."""
        deadline_s = time.monotonic() + timeout_s
        while self.code is None and self._foretold is None:
            left_s = deadline_s - time.monotonic()
            try:
                pidfd = patiently(functools.partial(os.pidfd_open, self.pid))
            except ProcessLookupError:  # foretold and buried in this moment
                continue
            try:
                if readable([pidfd], min(left_s, _END_LOOK_S)):
                    return True
            finally:
                os.close(pidfd)
            if left_s <= 0:
                return False
        return True

    def wait(self, timeout_s: float) -> int | None:
        """Wait until it exits and reap it; None if the time is up."""
        if self._foretold is not None:
            code = self._end_as_foretold(self._foretold)
            return code if self._gone.wait(timeout_s) else None
        if self.code is None:
            try:
                pidfd = patiently(functools.partial(os.pidfd_open, self.pid))
            except ProcessLookupError:  # foretold and buried in this moment
                return self.wait(timeout_s)
            try:
                ready = readable([pidfd], timeout_s)
            finally:
                os.close(pidfd)
            if not ready:
                return None
            self._reap()
        return self.code


def end_processes(pids: Sequence[int], *, mark: str, timeout_s: float = 2.0) -> list[int]:
    """SIGKILL processes that are not this process's children, and wait until they are gone.

    Affects only processes whose command line or environment contains ``mark``, because the kernel
    may have reused a number. Returns those that are left when the time is up.
    """
    deadline_s = time.monotonic() + timeout_s
    left = []
    for pid in pids:
        try:
            pidfd = patiently(functools.partial(os.pidfd_open, pid))
        except OSError:
            continue  # gone, or never started (0)
        try:
            if not _carries(pid, pidfd=pidfd, mark=mark):
                continue
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not readable([pidfd], deadline_s - time.monotonic()):
                left.append(pid)
        except ProcessLookupError:
            continue
        finally:
            os.close(pidfd)
    return left


def _carries(pid: int, *, pidfd: int, mark: str) -> bool:
    """Return whether the process names ``mark``.

    Wait a moment for one in the middle of its exec.
    """
    for _ in range(_EXEC_LOOKS):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        if command:
            return mark.encode() in command + b"\0" + environment
        if readable([pidfd], _EXEC_LOOK_S):
            return False  # a zombie: it has ended already
    return False
