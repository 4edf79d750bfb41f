"""A plain file written beside training: the cost of disk writes alone.

A process with the priority of pack writers writes its own memory, bypassing the page cache. It
computes nothing. It shows the cost of persistence without any work of Holdfast: the disk, and on a
virtual machine its host, take that time from the trainers.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from holdfast.ckpt.native.priority import yield_to_others

_WRITE_BYTES: Final = 4 << 20
_DIRECT: Final = getattr(os, "O_DIRECT", 0)


class PlainDisk:
    """Writes ``size_bytes`` at every save; the save is done when they are durable."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        whole = max(size_bytes // _WRITE_BYTES, 1) * _WRITE_BYTES
        self._process = context.Process(target=_write, args=(path, whole, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()
        self._is_busy = False

    def save(self, step: int) -> None:
        """Ask the process to write the file."""
        self._pipe.send(step)
        self._is_busy = True

    def fence(self) -> None:
        """Return at once."""

    def is_done(self) -> bool:
        """Say whether the file is written. Raises the system's error if writing failed."""
        if self._is_busy and self._pipe.poll():
            if (error := self._pipe.recv()) is not None:
                raise error
            self._is_busy = False
        return not self._is_busy

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _write(path: Path, size_bytes: int, pipe: Connection) -> None:
    yield_to_others()
    memory = memoryview(mmap.mmap(-1, size_bytes))
    part = os.urandom(_WRITE_BYTES)
    for at in range(0, size_bytes, _WRITE_BYTES):
        memory[at : at + _WRITE_BYTES] = part
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            try:
                _write_file(path, memory)
                pipe.send(None)
            except OSError as error:
                pipe.send(error)
            path.unlink(missing_ok=True)


def _write_file(path: Path, memory: memoryview) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = os.open(path, flags | _DIRECT, 0o600)
    except OSError:  # O_DIRECT is refused, as on tmpfs
        fd = os.open(path, flags, 0o600)
    try:
        for at in range(0, len(memory), _WRITE_BYTES):
            os.write(fd, memory[at : at + _WRITE_BYTES])
        os.fsync(fd)
    finally:
        os.close(fd)
