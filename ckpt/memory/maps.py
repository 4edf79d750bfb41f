"""Mappings of slot files, kept warm: mapping a slot again costs more than copying it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast.ckpt.errors import CkptError, PeerError
from holdfast.ckpt.memory.arena import SlotFile, has_little_room
from holdfast.ckpt.memory.hosts import host_id


class SlotMaps:
    """The slots this process has mapped, by path; safe to share between threads.

    Shared memory becomes free only once no process maps it, and giving it back takes long. So
    `prune` drops mappings of removed files while nothing waits; where memory is scarce, `open` of
    another slot drops them too. ``host`` is the host of the files (`holdfast.ckpt.memory.hosts`),
    by default this machine.
    """

    def __init__(self, *, host: str = "") -> None:
        self.host = host or host_id()
        self._lock = threading.Lock()
        self._slots: dict[str, tuple[tuple[int, int, int], SlotFile]] = {}
        self._ahead: ThreadPoolExecutor | None = None
        self._closed = False

    def open(self, path: str, *, warm: bool = True) -> SlotFile:
        """Return the mapped slot at ``path``. Raises ``PeerError`` if it is gone.

        Without ``warm`` a slot that is mapped for the first time has no pages yet.
        """
        with self._lock:
            stale = self._stale()
            if path in stale or (stale and has_little_room(Path(path).parent)):
                self._drop(stale)
            slot = self._known(path)
        if warm and not slot.is_warm:
            slot.warm()
        return slot

    def _known(self, path: str) -> SlotFile:
        if (known := self._slots.get(path)) is not None:
            return known[1]
        try:
            slot = SlotFile.open(path)
        except OSError as error:
            raise PeerError(f"{path}: slot cannot be mapped: {error.strerror}") from error
        if (identity := _identity(path)) is not None:
            self._slots[path] = (identity, slot)
        return slot

    def map_ahead(self, paths: Sequence[str]) -> None:
        """Map slots on a separate thread: this process will be granted them soon."""
        with self._lock:
            fresh = [path for path in paths if not self._is_warm(path)]
            if not fresh or self._closed:
                return
            if self._ahead is None:
                self._ahead = ThreadPoolExecutor(1, thread_name_prefix="ckpt-maps")
            for path in fresh:
                self._ahead.submit(self._map_one, path)

    def _is_warm(self, path: str) -> bool:
        return path in self._slots and self._slots[path][1].is_warm

    def _map_one(self, path: str) -> None:
        if not self._closed:
            with contextlib.suppress(CkptError):  # removed meanwhile: its user will raise
                self.open(path)

    def prune(self) -> None:
        """Drop the mappings of files that are gone."""
        with self._lock:
            self._drop(self._stale())

    def _stale(self) -> list[str]:
        return [p for p, (identity, _) in self._slots.items() if _identity(p) != identity]

    def _drop(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._slots.pop(path)[1].close()

    def close_later(self) -> None:
        """Drop all mappings on a thread: the kernel clears a page table entry for every page."""
        slots = [slot for _, slot in self._slots.values()]

        def close() -> None:
            for slot in slots:
                slot.cool()
            self.close()

        threading.Thread(target=close, name="ckpt-unmap", daemon=True).start()

    def close(self) -> None:
        """Drop all mappings, after waiting for one that is being made ahead."""
        self._closed = True
        if self._ahead is not None:
            self._ahead.shutdown(cancel_futures=True)
        with self._lock:
            for _, slot in self._slots.values():
                slot.close()
            self._slots.clear()


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size)
