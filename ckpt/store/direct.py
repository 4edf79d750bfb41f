"""Writing of large files around the page cache: a tenth of the processor time, and no memory taken.

A trainer's machine does not read again what it writes in the background. The page cache costs the
kernel a page lookup, a copy and a page drop for every 4 KiB. Here bytes are copied into one aligned
buffer that stays in place, and go to the disk from there. A part may do that copy itself, and
checksum the bytes in the same pass. The buffer uses huge pages where possible: the kernel then
looks up two pages for each write, not a thousand.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterable
from typing import Final

from holdfast.ckpt.native.isal import address_of
from holdfast.ckpt.store.base import Part, is_poured

BUFFER_BYTES: Final = 4 << 20
_HUGE_BYTES: Final = 2 << 20
_BLOCK: Final = 4096
_DIRECT: Final = getattr(os, "O_DIRECT", 0)


def write_all(fd: int, parts: Iterable[Part]) -> int:
    """Write ``parts`` to a new file; return the bytes written.

    Every part is copied before the next one is requested. The page cache is used at the end of the
    file, and where the file system has no direct writes. Raises ``OSError``.
    """
    room = _aligned()
    start = address_of(room)
    size, filled, direct = 0, 0, False
    for part in parts:
        body, at = part if is_poured(part) else memoryview(part).cast("B"), 0
        while at < body.nbytes:
            count = min(body.nbytes - at, BUFFER_BYTES - filled)
            if isinstance(body, memoryview):
                room[filled : filled + count] = body[at : at + count]
            else:
                body.pour(start + filled, count)
            at, filled, size = at + count, filled + count, size + count
            if filled == BUFFER_BYTES:
                direct = direct or (size == BUFFER_BYTES and _switch(fd, on=True))
                direct = _write(fd, room, direct=direct)
                filled = 0
    if direct:
        _switch(fd, on=False)
    _write(fd, room[:filled], direct=False)
    return size


def _aligned() -> memoryview:
    """Return a buffer that begins at a huge page; the disk needs aligned pages in any case."""
    mapping = mmap.mmap(-1, BUFFER_BYTES + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(mapping)
    first = -address_of(view) % _HUGE_BYTES
    return view[first : first + BUFFER_BYTES]


def _write(fd: int, view: memoryview, *, direct: bool) -> bool:
    """Write all of ``view``; return whether later writes can be ``direct``."""
    at = 0
    while at < view.nbytes:
        try:
            at += os.write(fd, view[at:])
        except OSError:
            if not direct:
                raise
            direct = _switch(fd, on=False)  # refused: larger blocks, or no direct writes
        if direct and at % _BLOCK:
            direct = _switch(fd, on=False)
    return direct


def _switch(fd: int, *, on: bool) -> bool:
    """Switch direct writes on or off; return whether they are on now."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
    except OSError:
        return False
    return on and bool(_DIRECT)
