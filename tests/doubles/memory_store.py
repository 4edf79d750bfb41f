"""A store in memory: the fake that passes the conformance suite of all stores."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from hashlib import sha256

from typing_extensions import Buffer

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.store.base import SMALL_FILE_BYTES, Unpublished
from holdfast.ckpt.store.regular import check_size


class MemoryFile:
    """An open file of a `MemoryStore`: its bytes at the time of opening."""

    run_bytes = 1 << 20

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.nbytes = len(data)

    def read_into(self, buffers: Sequence[Buffer], at: int) -> int:
        """Fill ``buffers`` from offset ``at``; return the bytes read."""
        start = at
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            found = self._data[at : at + view.nbytes]
            view[: len(found)] = found
            at += len(found)
        return at - start

    def close(self) -> None:
        """Do nothing."""


class MemoryStore:
    """Named files in a dict, used by many threads of one process."""

    def __init__(self, root: str = "memory://test") -> None:
        self.root = root
        self._files: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def where(self, name: str) -> str:
        """Return the name below the root."""
        return f"{self.root}/{name}" if name else self.root

    def names(self, prefix: str) -> list[str]:
        """Return the names directly below the folder ``prefix``, sorted."""
        folder = f"{prefix}/" if prefix else ""
        with self._lock:
            below = [name.removeprefix(folder) for name in self._files if name.startswith(folder)]
        return sorted({name.partition("/")[0] for name in below})

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, None when it does not exist."""
        with self._lock:
            data = self._files.get(name)
        return None if data is None else len(data)

    def read(self, name: str, *, most_bytes: int = SMALL_FILE_BYTES) -> bytes:
        """Return a file's bytes."""
        with self._lock:
            data = self._files.get(name)
        if data is None:
            raise NotFoundError(f"{self.where(name)}: not there (cannot read it); check the path")
        check_size(self.where(name), len(data), most_bytes=most_bytes)
        return data

    def open(self, name: str) -> MemoryFile:
        """Open a file for ranged reads."""
        return MemoryFile(self.read(name))

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """Write a file from ``parts``, replacing any old one; return its size."""
        data = b"".join(memoryview(part).cast("B") for part in parts)
        with self._lock:
            self._files[name] = data
        return len(data)

    def fetch(self, name: str) -> tuple[bytes, str]:
        """Return a file's bytes and a digest of them."""
        data = self.read(name)
        return data, sha256(data).hexdigest()

    def replace(self, name: str, data: bytes, *, expected: str | None) -> bool:
        """Publish a file if its version is still ``expected``; say whether it was published."""
        with self._lock:
            there = self._files.get(name)
            found = None if there is None else sha256(there).hexdigest()
            if found != expected:
                return False
            self._files[name] = bytes(data)
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""
        with self._lock:
            for name in names:
                self._files.pop(name, None)

    def remove(self, folder: str) -> None:
        """Do nothing: a folder exists as long as a file is in it."""

    def sweep(self, folder: str) -> None:
        """Do nothing: writers in memory leave nothing behind."""

    def unpublished(self, folder: str) -> list[Unpublished]:
        """Return nothing: a write in memory is complete at once."""
        return []
