"""The output of a process on its way to a log file, which a full disk must not hold up."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_BYTES: Final = 1 << 16
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_log = logging.getLogger(__name__)


class OutputCopy:
    """Copies what arrives in a pipe to a file; ``stamped``: each line behind its time (`stamp`).

    A process that writes to a file itself fails on a full disk: a ``print`` raises. Here the bytes
    that the disk refuses are lost; a line in the file says how many once there is room again.
    """

    def __init__(self, path: Path, *, stamped: bool = False) -> None:
        """Make the pipe; ``fd`` is its end for the process. Raises ``OSError`` without handles."""
        self._path, self._lost_bytes, self._file = path, 0, -1
        self._stamped, self._begins = stamped, True
        self._pipe, self.fd = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)

    def begin(self) -> None:
        """Copy from now on, until the last process that has the pipe closes it."""
        self._thread.start()
        self.release()

    def release(self) -> None:
        """Close the process's end here, and the pipe too if copying has not begun."""
        os.close(self.fd)
        if self._thread.ident is None:
            os.close(self._pipe)

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is copied, or the time is up."""
        self._thread.join(timeout_s)

    def _copy(self) -> None:
        with contextlib.suppress(OSError):  # the first bytes say why they are lost
            self._open()  # a process that prints nothing has a log as well
        while part := os.read(self._pipe, _BYTES):
            if self._lost_bytes and self._append(self._lost_line()):
                self._lost_bytes = 0
            if self._lost_bytes or not self._append(self._timed(part)):
                self._lost_bytes += len(part)
                self._begins = True
            else:
                self._begins = part.endswith(b"\n")
        if self._lost_bytes:
            _log.warning("%s: bytes of output lost: %d", self._path, self._lost_bytes)
        os.close(self._pipe)
        if self._file >= 0:
            os.close(self._file)

    def _lost_line(self) -> bytes:
        line = f"[holdfast: bytes of output lost here: {self._lost_bytes}]\n".encode()
        return b"\n" + (stamp(time.time()) + line if self._stamped else line)

    def _timed(self, part: bytes) -> bytes:
        """Return bytes of the process, with the time before each line that begins in them."""
        if not self._stamped:
            return part
        now = stamp(time.time())
        last_ends = part.endswith(b"\n")
        lines = part.removesuffix(b"\n").replace(b"\n", b"\n" + now)
        return (now if self._begins else b"") + lines + (b"\n" if last_ends else b"")

    def _open(self) -> None:
        if self._file < 0:
            torn = self._stamped and _is_torn(self._path)
            self._file = os.open(self._path, _APPEND, 0o600)
            if torn:
                os.write(self._file, b"\n")

    def _append(self, part: bytes) -> bool:
        """Append bytes, all or none."""
        why = os.strerror(errno.ENOSPC)  # the reason of a write that is cut short
        try:
            self._open()
            size_bytes = os.fstat(self._file).st_size
            if os.write(self._file, part) == len(part):
                return True
            os.ftruncate(self._file, size_bytes)
        except OSError as error:
            why = str(error.strerror)
        if not self._lost_bytes:
            _log.warning("%s: output is lost: %s", self._path, why)
        return False


def stamp(time_s: float) -> bytes:
    """Return the beginning of a line that was printed then, as in ``2026-01-31T09:26:53.589Z``.

    ``time_s`` is in seconds since 1970 (UTC); a space follows the time.
    """
    text = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z ").encode()


def _is_torn(path: Path) -> bool:
    """Say whether the last line of a file has no end, as a killed process leaves it."""
    try:
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False
