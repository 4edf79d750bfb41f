"""Start of a node's sidecar process, and its end without shared memory left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from time import monotonic

import msgspec

from holdfast.ckpt.descriptors import descriptor_of, readable
from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.memory.arena import arena_path, hold, sweep
from holdfast.ckpt.private import make_private
from holdfast.ckpt.sidecar.config import FAREWELL, SidecarConfig

START_TIMEOUT_S = 120.0
"""Far more than a start takes: on busy processors it takes half a minute."""
STOP_TIMEOUT_S = 5.0

_ENV = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's library starts a thread per processor otherwise; a sidecar does no linear algebra."""


class SidecarProcess:
    """A running sidecar, tied to this process by a lifeline: a pipe whose end it watches.

    This object also holds the arena directory's lock: neither the sidecar's end nor a `sweep`
    removes the directory before its successor starts.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], address: str, arena_dir: Path, lock_fd: int
    ) -> None:
        self.process, self.address, self.arena_dir = process, address, arena_dir
        self.pid = process.pid
        self._lock_fd = lock_fd

    @property
    def lifeline(self) -> int:
        """The descriptor whose closing ends the sidecar."""
        assert self.process.stdin is not None
        return self.process.stdin.fileno()

    def stop(self) -> None:
        """End the sidecar; its memory goes, unless another process holds it. May be repeated."""
        self.release()
        with contextlib.suppress(OSError, ValueError):
            os.write(self.lifeline, FAREWELL)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        sweep(self.arena_dir.parent, exactly=self.arena_dir.name)

    def release(self) -> None:
        """Release only the arena directory's lock (a successor's process holds its own)."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def start_sidecar(  # noqa: PLR0913 - the fields of `SidecarConfig`
    *,
    run: str,
    node: str,
    key_file: Path,
    run_dir: Path | None = None,
    host: str = "127.0.0.1",
    memory_of: str = "",
    port: int = 0,
    lease_fd: int = -1,
    give_up_fd: int = -1,
) -> SidecarProcess:
    """Start the sidecar of ``node`` and return once it serves.

    It takes over a directory that an earlier sidecar of this node left. It shares memory with
    sidecars of this host that have the same ``memory_of``; that, ``port`` and ``lease_fd`` (which
    it inherits) are as in `SidecarConfig`. Its log goes to ``run_dir/logs/sidecar-<node>.log``, or
    nowhere. Raises ``UnsafePathError`` if another user can write to that folder, and ``PeerError``
    with the end of the log when it does not start, or once ``give_up_fd`` is readable: the start is
    then undone.
    """
    directory = arena_path(run, node)
    config = SidecarConfig(
        run=run,
        node=node,
        key_file=str(key_file),
        arena_dir=str(directory),
        host=host,
        parent_pid=os.getpid(),
        memory_of=memory_of,
        port=port,
        lease_fd=lease_fd,
    )
    log = None
    if run_dir is not None:
        log = run_dir / "logs" / f"sidecar-{node}.log"
        make_private(log.parent)
        log.touch(mode=0o600)
    lock_fd = hold(directory)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(sweep, directory.parent, exactly=directory.name)
        on_failure.callback(os.close, lock_fd)
        process = _spawn(config, log)
        on_failure.callback(_kill, process)
        address = _await_address(process, log, give_up_fd=give_up_fd)
        on_failure.pop_all()
    return SidecarProcess(process, address, directory, lock_fd)


def _spawn(config: SidecarConfig, log: Path | None) -> subprocess.Popen[bytes]:
    name = f"{config.run}/{config.node}"
    argv = [sys.executable, "-P", "-m", "holdfast.ckpt.sidecar", "--name", name]
    with contextlib.ExitStack() as stack:
        fd = stack.enter_context(descriptor_of(msgspec.json.encode(config)))
        errors = stack.enter_context(log.open("ab")) if log else subprocess.DEVNULL
        return subprocess.Popen(
            [*argv, "--config-fd", str(fd)],
            env={**_ENV, **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            pass_fds=[fd, *([config.lease_fd] if config.lease_fd >= 0 else [])],
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _await_address(process: subprocess.Popen[bytes], log: Path | None, *, give_up_fd: int) -> str:
    assert process.stdout is not None
    watched = [process.stdout.fileno()]
    if give_up_fd >= 0:
        watched.append(give_up_fd)
    deadline_s, text = monotonic() + START_TIMEOUT_S, b""
    while not text.endswith(b"\n"):
        left_s = deadline_s - monotonic()
        found = readable(watched, left_s)
        if give_up_fd in found:
            raise PeerError("the start of the sidecar was cancelled")
        if not found:
            raise PeerError(
                f"the sidecar did not start within {START_TIMEOUT_S:g} s: look for a processor or "
                f"a disk that is overloaded{f', and into {log}' if log else ''}"
            )
        if not (part := process.stdout.read(4096)):
            output = log.read_text(errors="replace")[-2000:].strip() if log else "(not captured)"
            raise PeerError(f"the sidecar exited with {process.wait()} while starting: {output}")
        text += part
    return str(msgspec.json.decode(text)["address"])
