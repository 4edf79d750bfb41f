"""Scripts that are run as by hand, without the four seconds that their imports take.

A server of the test session imports torch once, and every script is a fork of it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from session_imports import PRELOAD

from holdfast.ckpt.descriptors import readable
from holdfast.elastic.processes.children import Child

_SERVER = Path(__file__).with_name("script_server.py")
_SURROUNDINGS = {**os.environ}
"""The environment in which a server imports: none of what a test sets for itself."""

_servers: dict[tuple[str, ...], _Server] = {}


class _Server:
    """The server, and the orders to it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, str(_SERVER), str(theirs.fileno()), *modules]
            self._child = Child.start(
                argv, env=_SURROUNDINGS, tied=True, output=None, pass_fds=(theirs.fileno(),)
            )

    def status(self, order: Mapping[str, object], fds: Sequence[int], *, timeout: float) -> int:
        """Return the exit status of a script as `subprocess` tells it."""
        socket.send_fds(self.socket, [msgspec.json.encode(order)], fds)
        pid = self._answer()
        if not readable([self.socket.fileno()], timeout):
            os.kill(pid, signal.SIGKILL)
            self._answer()
            raise subprocess.TimeoutExpired(str(order["command"]), timeout)
        return os.waitstatus_to_exitcode(self._answer())

    def _answer(self) -> int:
        said = self.socket.recv(64)
        assert said, "the server of scripts has ended"
        return int(said)


def ran(
    command: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 250.0,
    check: bool = False,
    imports: tuple[str, ...] = PRELOAD,
) -> subprocess.CompletedProcess[str]:
    """Run ``python SCRIPT …`` or ``python -m MODULE …`` and return its end and what it said.

    This is `subprocess.run` for a script that imports torch: it shares no memory, no state of
    torch and no random numbers with scripts before it. With ``HOLDFAST_PRELOAD=``, or beside the
    main thread, its interpreter is started. ``imports`` are further modules in the server.
    """
    words, surroundings = [str(word) for word in command], dict(os.environ if env is None else env)
    if not PRELOAD or threading.current_thread() is not threading.main_thread():
        return subprocess.run(
            words, cwd=cwd, env=surroundings, capture_output=True, text=True, timeout=timeout,
            check=check,
        )  # fmt: skip
    if imports not in _servers:
        _servers[imports] = _Server(imports)
    order = {"command": words, "directory": str(cwd or Path.cwd()), "env": surroundings}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        fds = (out.fileno(), error.fileno())
        status = _servers[imports].status(order, fds, timeout=timeout)
        out.seek(0)
        error.seek(0)
        said, complained = out.read().decode(), error.read().decode()
    done = subprocess.CompletedProcess(words, status, said, complained)
    if check and status:
        print(complained, file=sys.stderr)
        done.check_returncode()
    return done
