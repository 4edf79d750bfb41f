"""Pages of shared memory: huge ones where the kernel has them, filled before they are needed.

To fill fresh pages costs more than to copy into warm ones. So they are filled ahead, in the kernel
(``MADV_POPULATE_READ`` and ``_WRITE``, Linux 5.14) and without the GIL: Python's own ``mmap`` keeps
the GIL while ``MAP_POPULATE`` works.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.ckpt.native.isal import address_of

SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_MODES = ("[always]", "[within_size]", "[advise]", "[force]")
_MAP_FIXED = 0x10
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_NO_ROOM = (errno.EFAULT, errno.ENOMEM)  # EFAULT: a write to the page would have been a SIGBUS
_AT_ONCE_BYTES = 2 << 20
"""The bytes filled in one call.

Meanwhile the kernel keeps the process's map of its memory locked: no thread can map or unmap memory
or grow its heap, and once one waits for that, no page can fault.
"""


def make_file(path: Path, nbytes: int, *, check: Callable[[], None] = lambda: None) -> mmap.mmap:
    """Make a file of shared memory with all its pages, and map it.

    Calls ``check`` repeatedly meanwhile. Raises ``OSError`` when the file cannot be made (see
    `is_no_room`), and any error of ``check``; leaves nothing behind then.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        allocate(fd, nbytes, check=check)
        mapping = map_pages(fd)
        try:
            populate(mapping, check=check)
        except BaseException:
            mapping.close()
            raise
        return mapping
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def open_file(path: str | Path) -> mmap.mmap | None:
    """Map an existing file, or return None if it is empty. `populate` fills its page table."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return map_pages(fd) if os.fstat(fd).st_size else None
    finally:
        os.close(fd)


def join_files(path: str | Path, part: str | Path, *, at: int, writable: bool) -> mmap.mmap:
    """Map one file with all of another in between, adjacent in memory.

    The other file's pages come after the first ``at`` bytes, which are whole pages; its length is
    whole pages, too. Without ``writable`` a write to them ends the process. Raises ``OSError``.
    """
    outer, inner = (os.open(each, os.O_RDWR | os.O_CLOEXEC) for each in (path, part))
    try:
        rest, inside = os.fstat(outer).st_size - at, os.fstat(inner).st_size
        # The mapping owns its range of addresses; files replace the pages in it.
        mapping = mmap.mmap(-1, at + inside + rest, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with memoryview(mapping) as view:
            start = address_of(view)
        for place, nbytes, fd, first, may_write in (
            (start, at, outer, 0, True),
            (start + at, inside, inner, 0, writable),
            (start + at + inside, rest, outer, at, True),
        ):
            _replace_pages(place, nbytes, fd=fd, first=first, writable=may_write)
        return mapping
    finally:
        os.close(outer)
        os.close(inner)


def _replace_pages(address: int, nbytes: int, *, fd: int, first: int, writable: bool) -> None:
    libc = _libc()
    libc.mmap.restype = ctypes.c_void_p
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    found = libc.mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(prot),
        ctypes.c_int(mmap.MAP_SHARED | _MAP_FIXED),
        ctypes.c_int(fd),
        ctypes.c_long(first),
    )
    if found != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_no_room(error: OSError) -> bool:
    """Return whether memory ran out, or the request exceeds the largest possible file."""
    return error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)


def huge_pages() -> bool:
    """Return whether the kernel backs shared memory with huge pages on request."""
    try:
        return any(mode in SHMEM_HUGE.read_text() for mode in _HUGE_MODES)
    except OSError:
        return False


def allocate(fd: int, nbytes: int, *, check: Callable[[], None] = lambda: None) -> None:
    """Give the file of ``fd`` the length ``nbytes`` with every page allocated.

    Raises ``OSError`` (``ENOSPC``) when the file system has no room for it; ``check`` as in
    `make_file`.
    """
    os.ftruncate(fd, nbytes)
    if huge_pages():  # only a fault in a mapping with this advice makes a huge page
        mapping = map_pages(fd)
        try:
            if populate(mapping, absent=True, check=check):
                return
        finally:
            mapping.close()
    for at, part_bytes in _parts(nbytes):
        check()
        os.posix_fallocate(fd, at, part_bytes)


def map_pages(fd: int) -> mmap.mmap:
    """Map all of ``fd`` for reading and writing; `populate` fills its page table."""
    mapping = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if huge_pages():
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return mapping  # a kernel without them, or another kind of file
    return mapping


def populate(
    mapping: mmap.mmap,
    *,
    at: int = 0,
    nbytes: int = sys.maxsize,
    absent: bool = False,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Fill the page table of ``mapping``, or of ``nbytes`` from ``at``: no access then faults.

    ``absent`` pages are made one by one; existing pages are mapped many at a time. Other threads of
    the process wait for a small part of it at most. Returns False where the kernel is too old for
    this: then the first access of each page faults. Raises ``OSError`` (``ENOSPC``) when there is
    no memory for missing pages; ``check`` as in `make_file`.
    """
    advice = _MADV_POPULATE_WRITE if absent else _MADV_POPULATE_READ
    with memoryview(mapping) as view:  # keeps it mapped meanwhile
        first, end = at - at % mmap.PAGESIZE, min(len(view), at + nbytes)
        start = address_of(view) + first
        for part, part_bytes in _parts(end - first):
            check()
            if not _advise(start + part, part_bytes, advice):
                return False
    return True


def drop(mapping: mmap.mmap) -> None:
    """Clear the page table of shared ``mapping``; its contents stay. Unmapping is quick then."""
    with memoryview(mapping) as view:  # keeps it mapped meanwhile
        start = address_of(view)
        for part, part_bytes in _parts(len(view)):
            if not _advise(start + part, part_bytes, mmap.MADV_DONTNEED):
                return


def _parts(nbytes: int) -> Iterator[tuple[int, int]]:
    for at in range(0, nbytes, _AT_ONCE_BYTES):
        yield at, min(_AT_ONCE_BYTES, nbytes - at)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _advise(address: int, nbytes: int, advice: int) -> bool:
    libc = _libc()
    while libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice):
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in _NO_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return False
    return True
