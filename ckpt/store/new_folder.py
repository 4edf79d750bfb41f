"""A directory that appears under its name complete and durable, or not at all.

It is filled beside its target under a hidden name, then renamed. The next writer of the same
content (``tag``) finds and continues the directory of a killed writer; it removes one of other
content. Writers hold a lock on it, so none takes a directory that another is still filling.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final

from typing_extensions import Buffer

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.store.refusals import refusals

_PARTIAL: Final = ".partial"
_THREADS: Final = 4


class NewFolder(Closing):
    """The directory ``target`` during its creation; an exit without `publish` removes it.

    Only a process that is killed or interrupted leaves it for the next writer. Raises
    ``StoreError`` if ``target`` exists, or another process is writing it.
    """

    def __init__(self, target: str | Path, *, tag: str) -> None:
        self.target = Path(target).absolute()
        if "://" in str(target):
            raise StoreError(f"{target}: only a directory of this machine can be written here")
        self._refuse_existing()
        self.path = self.target.parent / f".{self.target.name}.{tag}{_PARTIAL}"
        with refusals(self.path, "write it"):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._remove_others()
            self.path.mkdir(exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not _locked(self._lock):
            os.close(self._lock)
            self._lock = -1
            raise StoreError(f"{self.target}: another process is writing it; wait until it ends")

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.target):
            raise StoreError(
                f"{self.target}: already exists and is not overwritten; choose another name"
            )

    def _remove_others(self) -> None:
        prefix = f".{self.target.name}."
        for path in self.target.parent.iterdir():
            if not (path.name.startswith(prefix) and path.name.endswith(_PARTIAL)):
                continue
            if "." in path.name[len(prefix) : -len(_PARTIAL)] or path == self.path:
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    if _locked(fd):
                        shutil.rmtree(path)
                finally:
                    os.close(fd)

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write a file of the directory, with its folders. It is durable once published."""
        path = self.path / name
        with refusals(path, "write it"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb", buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), part)

    def room(self, name: str, nbytes: int) -> Path:
        """Make a file of ``nbytes`` zeros, unless it exists; return its path.

        Its blocks are allocated on the disk, so that a write to its mapping cannot fail for lack of
        room.
        """
        path = self.path / name
        with refusals(path, "write it"):
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, nbytes)
        return path

    def append(self, name: str, data: Buffer) -> None:
        """Write behind the end of a file."""
        path = self.path / name
        with refusals(path, "write it"), path.open("ab", buffering=0) as file:
            _write_all(file.fileno(), data)

    def publish(self) -> None:
        """Make all files durable and give the directory its name: now it becomes visible."""
        with refusals(self.target, "write it"):
            folders: list[Path] = []
            files: list[Path] = []
            for folder, _, names in os.walk(self.path, topdown=False):
                folders.append(Path(folder))
                files += (Path(folder, name) for name in names)
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="ckpt-fsync") as pool:
                list(pool.map(_fsync, files))
            for path in folders:
                _fsync(path)
            self._refuse_existing()
            self.path.rename(self.target)
            _fsync(self.target.parent)
        self._release()

    def close(self) -> None:
        """Remove the directory unless it was published."""
        if self._lock >= 0:
            with refusals(self.path, "write it"):
                shutil.rmtree(self.path)
            self._release()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self.close()
        else:  # interrupted: the next writer continues it
            self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_all(fd: int, data: Buffer) -> None:
    left = memoryview(data).cast("B")
    while left.nbytes:
        left = left[os.write(fd, left) :]


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
