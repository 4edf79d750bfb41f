"""Mappings of slot files, kept warm: mapping a slot anew costs more than copying it."""

from __future__ import annotations

import threading
from pathlib import Path

from ckpt.arena import SlotFile
from ckpt.errors import PeerError


class SlotMaps:
    """The slots this process has mapped, by path; safe to share between threads.

    Shared memory is free only once nobody maps it, so mappings of removed files are dropped
    whenever another slot is opened.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, tuple[tuple[int, int, int], SlotFile]] = {}

    def open(self, path: str) -> SlotFile:
        """Return the mapped slot at ``path``. Raises ``PeerError`` where it is gone."""
        with self._lock:
            self._prune()
            known = self._slots.get(path)
            if known is not None:
                return known[1]
            try:
                slot = SlotFile.open(path)
            except OSError as error:
                raise PeerError(f"{path}: slot cannot be mapped: {error.strerror}") from error
            identity = _identity(path)
            if identity is not None:
                self._slots[path] = (identity, slot)
            return slot

    def _prune(self) -> None:
        for path in [p for p, (identity, _) in self._slots.items() if _identity(p) != identity]:
            self._slots.pop(path)[1].close()

    def close(self) -> None:
        """Drop all mappings."""
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
