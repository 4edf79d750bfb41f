"""The server of environment processes: it imports their modules, forks them, and is their parent.

It decides nothing: its owner, a rollout worker, orders forks and kills. It hands on what the owner
and the processes say to each other, tells the end of each process, and ends with its owner.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Final

from holdfast.adapters.rl.environments.processes import sandbox, wire
from holdfast.adapters.rl.environments.registry import module_of
from holdfast.ckpt.descriptors import allow_many, readable
from holdfast.ckpt.errors import CorruptError
from holdfast.elastic.preload.loading import UnfitModuleError, load

_ENDING_S: Final = 0.05
_AUTOGROUP: Final = Path("/proc/self/autogroup")
_AUTOGROUP_NICE: Final = b"19"

Place = tuple[wire.FrameStream, int]
"""The connection of an environment process, and its number."""


def serve(config: wire.EnvironmentServerConfig) -> Place | None:
    """Carry out orders; return the place of an environment in its process, None at the end."""
    owner = socket.socket(fileno=config.fd)
    owner.set_inheritable(False)
    allow_many()
    frames = wire.FrameStream(owner)
    for each in config.processes.writable:
        if not Path(each).is_dir():
            _refuse(frames, f"writable has {each!r}, which is no directory here")
            return None
    if config.processes.yields:
        _yield_session()
    missing = sandbox.enter(config.processes)
    if missing and config.processes.sandbox == "require":
        _refuse(frames, f"the sandbox is required, and this machine lacks it: {told(missing)}")
        return None
    if config.processes.sandbox != "off" and "files" not in missing:
        os.environ["TMPDIR"] = sandbox.SCRATCH
    sys.path[:] = config.path
    try:
        load([module_of(config.factory), *config.processes.preload], lambda _: None)
    except UnfitModuleError as error:
        _refuse(frames, str(error))
        return None
    sys.stdout.flush()  # else each fork would write it again
    frames.send(wire.SERVER, wire.encode(wire.ServerLoaded(missing=missing)))
    return _EnvironmentServer(frames).run()


def _yield_session() -> None:
    """Let other sessions have the processor before this one, which is the environments' alone.

    A kernel that groups processes by session (``sched_autogroup_enabled``) divides the processor
    among sessions first: there, the policy of a process counts in its own one only.
    """
    with contextlib.suppress(OSError):  # the kernel has no such groups
        _AUTOGROUP.write_bytes(_AUTOGROUP_NICE)


def told(missing: dict[str, str]) -> str:
    """Return the protection that a sandbox lacks as words."""
    return "; ".join(f"{each}: {why}" for each, why in missing.items())


def _refuse(frames: wire.FrameStream, why: str) -> None:
    frames.socket.setblocking(True)
    frames.send(wire.SERVER, wire.encode(wire.ServerRefused(why=why)))


class _EnvironmentServer:
    """The processes by their numbers; SIGCHLD wakes the loop."""

    def __init__(self, owner: wire.FrameStream) -> None:
        self._owner = owner
        self._frames: dict[int, wire.FrameStream] = {}
        self._pids: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._why: dict[int, str] = {}
        self._to_fork: deque[int] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(owner.fd, selectors.EVENT_READ, wire.SERVER)
        self._woken, waker = socket.socketpair()
        self._waker = waker
        for each in (self._woken, waker):
            each.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno())

    def run(self) -> Place | None:
        """See `serve`."""
        while True:
            timeout = 0 if self._to_fork else None
            for key, events in self._selector.select(timeout):
                if key.data is None:
                    self._reap()
                elif key.data == wire.SERVER:
                    if events & selectors.EVENT_WRITE:
                        self._owner.flush()
                    if events & selectors.EVENT_READ and not self._obey():
                        self._kill_all()
                        return None
                else:
                    self._hear(key.data, events)
            if self._to_fork:
                forked = self._fork(self._to_fork.popleft())
                if forked is not None:
                    return forked
            self._watch(wire.SERVER, self._owner)

    # -- the owner ---------------------------------------------------------------------------

    def _obey(self) -> bool:
        """Carry out what the owner ordered; False: it is gone."""
        try:
            received = self._owner.receive()
        except (EOFError, CorruptError):
            return False
        for number, message in received:
            if number == wire.SERVER:
                match wire.order.decode(message):
                    case wire.Fork(process=process):
                        self._to_fork.append(process)
                    case wire.KillProcess(process=process):
                        self._kill(process)
            elif (frames := self._frames.get(number)) is not None:
                frames.send(number, message)
                self._watch(number, frames)
        return True

    def _report(self, message: wire.Report) -> None:
        self._owner.send(wire.SERVER, wire.encode(message))

    def _watch(self, number: int, frames: wire.FrameStream) -> None:
        """Wait for room in the connection too, if there is something left to write."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE * frames.wants_to_write)
        if self._selector.get_key(frames.fd).events != events:
            self._selector.modify(frames.fd, events, number)

    # -- processes ---------------------------------------------------------------------------

    def _fork(self, number: int) -> Place | None:
        """Fork a process; return its place in it."""
        ours, theirs = wire.pair()
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            self._report(
                wire.ProcessEnded(process=number, code=0, why=f"no fork: {error.strerror}")
            )
            return None
        if not pid:
            self._leave()
            ours.close()
            sandbox.end_with_parent(server)
            os.setpgid(0, 0)
            return wire.FrameStream(theirs, waits=True), number
        theirs.close()
        with contextlib.suppress(OSError):  # the process did it itself, or has ended
            os.setpgid(pid, pid)
        frames = wire.FrameStream(ours)
        self._frames[number], self._pids[number], self._numbers[pid] = frames, pid, number
        self._selector.register(frames.fd, selectors.EVENT_READ, number)
        return None

    def _leave(self) -> None:
        """Give up all that is the server's, in a process that it forked."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for each in (self._owner.socket, self._woken, self._waker):
            each.close()
        for frames in self._frames.values():
            frames.close()

    def _hear(self, number: int, events: int) -> None:
        frames = self._frames.get(number)
        if frames is None:
            return
        if events & selectors.EVENT_WRITE:
            frames.flush()
            self._watch(number, frames)
        if events & selectors.EVENT_READ:
            self._hand_on(number, frames)

    def _hand_on(self, number: int, frames: wire.FrameStream) -> bool:
        """Hand on what a process said; False: there is nothing more to come."""
        try:
            received = frames.receive()
            if any(said_by != number for said_by, _ in received):
                raise CorruptError("a message of another process")
        except EOFError:
            if not _ends(self._pids[number]):
                self._kill(number, "it closed its connection")
            self._disconnect(number)
            return False
        except CorruptError as error:
            self._kill(number, f"it sent garbage ({error})")
            self._disconnect(number)
            return False
        for _, message in received:
            self._owner.send(number, message)
        return bool(received)

    def _disconnect(self, number: int) -> None:
        frames = self._frames.pop(number)
        self._selector.unregister(frames.fd)
        frames.close()

    def _kill(self, number: int, why: str = "") -> None:
        pid = self._pids.get(number)
        if pid is None:
            if number in self._to_fork:
                self._to_fork.remove(number)
                self._report(wire.ProcessEnded(process=number, code=0, why="not begun"))
            return
        if why:
            self._why[number] = why
        _kill_group(pid)

    def _kill_all(self) -> None:
        for pid in self._pids.values():
            _kill_group(pid)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(1 << 12):
                pass
        while (found := _ended()) is not None:
            number = self._numbers.pop(found, None)
            if number is None:
                os.waitpid(found, 0)  # an orphan of a process
                continue
            frames = self._frames.get(number)
            while frames is not None and self._hand_on(number, frames):
                pass  # its last words
            if number in self._frames:
                self._disconnect(number)
            _kill_group(found)  # the rest of it; the number is its own until it is reaped
            _, status = os.waitpid(found, 0)
            del self._pids[number]
            code = os.waitstatus_to_exitcode(status)
            why = self._why.pop(number, "")
            if code != -signal.SIGKILL:
                why = ""  # it was ending already
            self._report(wire.ProcessEnded(process=number, code=code, why=why))


def _ends(pid: int) -> bool:
    """Return whether a child that has closed its connection does so because it ends."""
    pidfd = os.pidfd_open(pid)
    try:
        return bool(readable([pidfd], _ENDING_S))
    finally:
        os.close(pidfd)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _ended() -> int | None:
    """Return a child that has ended and is not reaped yet."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid
