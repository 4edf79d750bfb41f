"""Sidecars that share this machine's memory, and the files that they may map of each other.

Two processes are on one host when they see the same boot id *and* a path opens as the very same
file: containers of one kernel may each have shared memory of their own.
"""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from holdfast.ckpt.types import learn

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class FileRef(msgspec.Struct, frozen=True, kw_only=True):
    """A file of shared memory as its owner sees it."""

    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileRef:
        """Describe a file. Raises ``OSError`` if it is gone."""
        found = path.stat()
        return cls(path=str(path), device=found.st_dev, inode=found.st_ino)

    def is_here(self) -> bool:
        """Return whether the path leads to the same file in this process too."""
        try:
            return FileRef.of(Path(self.path)) == self
        except OSError:
            return False


@functools.cache
def host_id() -> str:
    """Return an id of this machine's kernel since its boot, or "" if it is unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


learn(globals())
