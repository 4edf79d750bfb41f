"""A server's process with all that it starts, which ends with the process that started it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from typing import Final

from holdfast.elastic.errors import ConfigError

# The leader of the server's process group. It ends the group when its end of the socket closes,
# which the kernel does however the other side ends; and when the server itself has ended, of which
# other processes may be left. It runs without site-packages, so that it costs little.
_GUARD: Final = """
import os, signal, socket, subprocess, sys, threading
pipe = socket.socket(fileno=0)
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
def mourn():
    while pipe.recv(64):
        pass
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=mourn, daemon=True).start()
signal.signal(signal.SIGTERM, lambda *_: None)
code = server.wait()
pipe.sendall(str(code).encode())
os.killpg(0, signal.SIGKILL)
"""


class ServerProcess:
    """The server of ``command``, in a group of processes of its own, ``without`` some variables.

    Raises ``ConfigError`` if there is no such program.
    """

    def __init__(self, command: Sequence[str], *, without: Collection[str] = ()) -> None:
        found = {name: value for name, value in os.environ.items() if name not in without}
        if not command or shutil.which(command[0], path=found.get("PATH")) is None:
            raise ConfigError(
                f"there is no program {command[0] if command else ''!r} for a server: install it, "
                "or give its path as the first word of command"
            )
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD, *command],
                stdin=theirs.fileno(),
                env=found,
                start_new_session=True,
            )
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """The number of the process group."""
        return self._guard.pid

    def ended(self) -> int | None:
        """Return the exit status as ``Popen.returncode`` once it has ended, else None."""
        if self._guard.poll() is None:
            return None
        try:
            return int(self._socket.recv(64) or -signal.SIGKILL)
        except OSError:
            return -signal.SIGKILL  # of the whole group

    def stop(self, *, grace_s: float) -> None:
        """Ask all of it to end, and kill what is left after ``grace_s``."""
        if self._guard.poll() is None:
            os.killpg(self._guard.pid, signal.SIGTERM)
            try:
                self._guard.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.kill()
        self._socket.close()

    def kill(self) -> None:
        """Kill all of it."""
        if self._guard.poll() is None:
            os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()
