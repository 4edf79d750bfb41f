"""Checkpoints in a directory of this machine (or one mounted here).

A file is written under a temporary name, fsynced, renamed into place, and its directory fsynced. A
writer holds a lock on its temporary file. So the files of killed writers are recognised without a
clock, and the next writer in that directory sweeps them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Final

from typing_extensions import Buffer

from holdfast.ckpt.closing import Closing
from holdfast.ckpt.errors import CorruptError, NotFoundError, StoreError, UnsafePathError
from holdfast.ckpt.native import crc, isal
from holdfast.ckpt.native.checked_read import Pieces, kernel, read_checked, read_pieces
from holdfast.ckpt.native.sums import Sums
from holdfast.ckpt.store import direct
from holdfast.ckpt.store.base import SMALL_FILE_BYTES, Part, Unpublished
from holdfast.ckpt.store.refusals import refusals
from holdfast.ckpt.store.regular import open_regular

_TEMPORARY: Final = ".tmp"
_BATCH_BYTES: Final = 8 << 20
_BATCH_PARTS: Final = 512
_IOV_MAX: Final = 1024
_RANDOM_BYTES: Final = 6
_ATTEMPTS: Final = 100
_LOOK: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE: Final = 2
"""``SYNC_FILE_RANGE_WRITE`` of Linux: start, do not wait."""


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Like `refusals`; bytes that the disk cannot return count as damaged: use another copy."""
    with refusals(path, "read it", reading=True):
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise CorruptError(
                f"{path}: the disk fails to read it; load another step, or restore the file from "
                "a copy"
            ) from error


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class LocalFile:
    """An open file."""

    run_bytes = 1 << 20

    def __init__(self, path: Path, *, most_bytes: int | None = None) -> None:
        self._path, self._fd = path, -1
        self._fd, self.nbytes = open_regular(path, most_bytes=most_bytes)

    def read_into(self, buffers: Sequence[Buffer], at: int) -> int:
        """Fill ``buffers`` from offset ``at``; return the bytes read."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        done = 0
        with _reading(self._path):
            while views:
                got = os.preadv(self._fd, views[:_IOV_MAX], at + done)
                done += got
                views = _behind(views, got)
                if not got:
                    break
        return done

    def read_checked(self, into: memoryview, at: int) -> tuple[int, list[int]]:
        """Fill ``into`` from offset ``at``; return the bytes read and the checksums of blocks."""
        if not into.nbytes or kernel() is None:
            got = self.read_into([into], at)
            return got, crc.block_checksums(isal.address_of(into), got) if got else []
        with _reading(self._path):
            return read_checked(self._fd, at, into)

    def read_pieces(self, pieces: Pieces) -> tuple[Sums, int, int]:
        """Read pieces of the file in one call; see `holdfast.ckpt.store.base.PieceFile`."""
        with _reading(self._path):
            return read_pieces(self._fd, pieces)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _behind(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return the rest of ``views`` behind their first ``nbytes``."""
    for number, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[number + 1 :]]
        nbytes -= view.nbytes
    return []


class FolderHold(Closing):
    """The hold of a folder (`LocalStore.hold`): a locked file in it, removed when it is closed.

    So are the folders that were made for it (``fresh``), as far as they are empty then.
    """

    def __init__(self, path: Path, fd: int, *, fresh: Sequence[Path]) -> None:
        self._path, self._fd, self._fresh = path, fd, fresh

    def close(self) -> None:
        """Give the folder up."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # if it cannot be removed now, it is swept later
                self._path.unlink()
                for folder in reversed(self._fresh):
                    folder.rmdir()
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class LocalStore:
    """A directory."""

    def __init__(self, root: str | Path) -> None:
        self.root = str(Path(root).absolute())

    def _path(self, name: str) -> Path:
        return Path(self.root, name)

    def where(self, name: str) -> str:
        """Return the absolute path."""
        return str(self._path(name))

    def names(self, prefix: str) -> list[str]:
        """Return the names in the folder ``prefix``, without temporary files."""
        path = self._path(prefix)
        try:
            with refusals(path, "list it", reading=True):
                return sorted(p.name for p in path.iterdir() if p.suffix != _TEMPORARY)
        except NotFoundError:
            return []

    def size(self, name: str) -> int | None:
        """Return a file's size, None when it does not exist."""
        try:
            path = self._path(name)
            with refusals(path, "look at it", reading=True):
                return path.stat().st_size
        except NotFoundError:
            return None

    def read(self, name: str, *, most_bytes: int = SMALL_FILE_BYTES) -> bytes:
        """Return a file's bytes."""
        with contextlib.closing(LocalFile(self._path(name), most_bytes=most_bytes)) as file:
            data = bytearray(file.nbytes)
            return bytes(memoryview(data)[: file.read_into([data], 0)])

    def open(self, name: str) -> LocalFile:
        """Open a file for ranged reads."""
        return LocalFile(self._path(name))

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """Write a file durably and atomically from ``parts``; return its size."""
        path = self._path(name)
        return self._publish(path, lambda fd: _write_all(fd, parts, path))

    def _publish(self, path: Path, write: Callable[[int], int]) -> int:
        with self._temporary(path) as (temporary, fd):
            size = write(fd)
            with refusals(path, "write it"):
                os.fsync(fd)
                temporary.rename(path)
                _fsync_directory(path.parent)
        return size

    def fetch(self, name: str) -> tuple[bytes, str]:
        """Return a file's bytes and a digest of them."""
        data = self.read(name)
        return data, sha256(data).hexdigest()

    def replace(self, name: str, data: bytes, *, expected: str | None) -> bool:
        """Write a file if its digest is still ``expected``; say whether it was written."""
        path = self._path(name)
        with self._temporary(path) as (temporary, fd):
            _write_all(fd, [data], path)
            with refusals(path, "write it"):
                os.fsync(fd)
            with self._locked(path.parent):
                try:
                    found = self.fetch(name)[1]
                except NotFoundError:
                    found = None
                if found != expected:
                    return False
                with refusals(path, "write it"):
                    temporary.rename(path)
                    _fsync_directory(path.parent)
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored.

        Raises ``UnsafePathError`` where a link would lead out of the root.
        """
        for folder, files in itertools.groupby(map(PurePosixPath, names), lambda each: each.parent):
            path = self._path(str(folder))
            with (
                contextlib.suppress(NotFoundError),
                refusals(path, "remove files in it"),
                self._folder(folder) as fd,
            ):
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(file.name, dir_fd=fd)

    def remove(self, folder: str) -> None:
        """Remove a folder and its subfolders, as far as they hold no file."""
        inside = PurePosixPath(folder)
        with (
            contextlib.suppress(NotFoundError),
            refusals(self._path(folder), "remove it"),
        ):
            for place, _, _ in os.walk(self._path(folder), topdown=False):
                below = inside / PurePosixPath(place).relative_to(self._path(folder))
                with contextlib.suppress(FileNotFoundError):
                    with self._folder(below) as fd:
                        _sweep(fd)
                    with self._folder(below.parent) as fd, _if_empty():
                        os.rmdir(below.name, dir_fd=fd)

    def sweep(self, folder: str) -> None:
        """Remove the temporary files of writers that are gone."""
        with (
            contextlib.suppress(NotFoundError),
            refusals(self._path(folder), "clean it"),
            self._folder(PurePosixPath(folder)) as fd,
        ):
            _sweep(fd)

    def unpublished(self, folder: str) -> list[Unpublished]:
        """Return the temporary files."""
        path = self._path(folder)
        with (
            contextlib.suppress(NotFoundError),
            refusals(path, "list it"),
            self._folder(PurePosixPath(folder)) as fd,
        ):
            return [
                Unpublished(where=str(path / name), abandoned=abandoned)
                for name, abandoned in _temporaries(fd)
            ]
        return []

    @contextlib.contextmanager
    def _folder(self, folder: PurePosixPath) -> Iterator[int]:
        """Open a folder that is reached from the root without a link.

        Somebody else may have prepared the root. Raises ``UnsafePathError``.
        """
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in folder.parts:
                if (below := _open_strictly(part, fd)) < 0:
                    raise UnsafePathError(
                        f"{self._path(str(folder))}: {part!r} is a link or no folder, and nothing "
                        "is written or removed through links: remove it by hand"
                    )
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Lock a folder against other processes that can see it."""
        with refusals(path, "lock it"):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with refusals(path, "lock it"):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def hold(self, folder: str) -> FolderHold:
        """Mark a folder as one that is being written to, as long as this process has the result."""
        path = self._path(folder)
        with refusals(path, "write in it"):
            for _ in range(_ATTEMPTS):
                with contextlib.suppress(FileNotFoundError, NotFoundError):
                    fresh = _make_directories(path)
                    with self._folder(PurePosixPath(folder)), self._locked(path):
                        return FolderHold(*_locked_file(path / "saver"), fresh=fresh)
        raise StoreError(f"{path}: another process removes it again and again; save again")

    @contextlib.contextmanager
    def alone(self, folder: str) -> Iterator[bool]:
        """Keep others from holding a folder; yields whether nobody holds it or writes in it."""
        path = self._path(folder)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._locked(path))
                waiting = [*self.unpublished(folder)]
                waiting += [
                    each for name in self.names(folder) for each in self._inside(path, name)
                ]
            except NotFoundError:
                yield False
                return
            yield all(each.abandoned for each in waiting)

    def _inside(self, path: Path, name: str) -> list[Unpublished]:
        below = path / name
        return self.unpublished(str(below.relative_to(self.root))) if below.is_dir() else []

    @contextlib.contextmanager
    def _temporary(self, path: Path) -> Iterator[tuple[Path, int]]:
        """Yield a locked new file beside ``path``; afterwards it is removed (or renamed)."""
        with refusals(path.parent, "write in it"):
            fresh, temporary, fd = _new_file(path)
        try:
            with refusals(path.parent, "write in it"):
                for folder in fresh:
                    _fsync_directory(folder.parent)
                with self._folder(PurePosixPath(path.relative_to(self.root).parent)) as inside:
                    _sweep(inside)
            yield temporary, fd
        finally:
            with contextlib.suppress(OSError):  # if it cannot be removed now, it is swept later
                temporary.unlink()
            os.close(fd)


class DirectStore(LocalStore):
    """A directory whose files are written around the page cache: cheap, where none is read soon.

    Each part is copied before the next, so that parts may be `Poured`, and a part may change once
    the next one is requested.
    """

    def write(self, name: str, parts: Iterable[Part]) -> int:
        """Write a file durably and atomically from ``parts``; return its size."""
        path = self._path(name)

        def write(fd: int) -> int:
            with refusals(path, "write it"):
                return direct.write_all(fd, parts)

        return self._publish(path, write)


def _make_directories(path: Path) -> list[Path]:
    """Create ``path`` and its missing parents; return the created ones, to be made durable."""
    missing = list(itertools.takewhile(lambda p: not p.exists(), (path, *path.parents)))
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
    return missing[::-1]


def _new_file(path: Path) -> tuple[list[Path], Path, int]:
    """Return new folders, not durable yet, and a locked temporary file for ``path`` in them.

    The file keeps its folder from removal, as another process may remove empty folders at any
    moment.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            return _make_directories(path.parent), *_locked_file(path)
    return _make_directories(path.parent), *_locked_file(path)


def _locked_file(path: Path) -> tuple[Path, int]:
    """Create a temporary file for ``path`` and lock it before another process sweeps it."""
    while True:
        # A process number is no name: in a container it is the same after every restart.
        temporary = path.parent / f".{path.name}.{secrets.token_hex(_RANDOM_BYTES)}{_TEMPORARY}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return temporary, fd
        os.close(fd)


def _open_strictly(name: str, folder: int) -> int:
    """Open a folder in an open one; -1 if it is a link or no folder, or leads upwards."""
    if name in ("..", "/"):
        return -1
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        return -1


def _sweep(folder: int) -> None:
    """Remove the temporary files of writers that are gone."""
    for name, abandoned in _temporaries(folder):
        if abandoned:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                os.unlink(name, dir_fd=folder)


def _temporaries(folder: int) -> Iterator[tuple[str, bool]]:
    """Yield the temporary files in an open folder, each with whether its lock is free.

    While one is yielded, this process holds its lock.
    """
    for name in sorted(os.listdir(folder)):
        if not (name.startswith(".") and name.endswith(_TEMPORARY)):
            continue
        try:
            fd = os.open(name, _LOOK, dir_fd=folder)
        except (FileNotFoundError, PermissionError):
            continue
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            continue  # a link or a socket: not a writer's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            abandoned = True
        except BlockingIOError:
            abandoned = False
        try:
            yield name, abandoned
        finally:
            os.close(fd)


@contextlib.contextmanager
def _if_empty() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _write_all(fd: int, parts: Iterable[Buffer], path: Path) -> int:
    """Write ``parts`` in large batches, the disk one batch behind; return the bytes written."""
    size = started = 0
    batch: list[memoryview] = []

    def flush() -> None:
        nonlocal batch, started
        left = batch
        with refusals(path, "write it"):
            while left:
                left = _behind(left, os.writev(fd, left[:_IOV_MAX]))
        if size - started >= _BATCH_BYTES:
            _start_writing(fd, started, size - started)
            started = size
        batch = []

    batch_bytes = 0
    for part in parts:
        view = memoryview(part).cast("B")
        if not view.nbytes:
            continue
        size += view.nbytes
        batch.append(view)
        batch_bytes += view.nbytes
        if batch_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_PARTS:
            flush()
            batch_bytes = 0
    flush()
    return size


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None  # not Linux
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def _start_writing(fd: int, at: int, nbytes: int) -> None:
    """Have the kernel start to write a range of an open file to the disk.

    Without it nothing is sent there before ``fsync``, which then has all of it to wait for. It is a
    hint, which may be refused without harm.
    """
    if nbytes and (call := _sync_file_range()) is not None:
        call(fd, at, nbytes, _WRITE)
