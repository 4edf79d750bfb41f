"""Files of shared memory that begin with the pages of another file: their *fixed part*.

``NUMBER+NAME.slot`` names ``NAME.slot-fixed`` beside it. Every mapping of the slot shows the pages
of that file behind the header, and then its own. So bytes that stay the same from step to step lie
in memory once, and readers see whole blocks and rows. A file keeps its name: a restarted process
finds the parts by the names.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Collection
from pathlib import Path

from holdfast.ckpt.native.pages import join_files, make_file, open_file

HEADER_BYTES = 4096
CAN_JOIN = HEADER_BYTES % mmap.PAGESIZE == 0
"""True if this machine's pages are small enough for fixed parts."""

_FIXED = "-fixed"
_UNFINISHED = ".part"


def numbered(directory: Path, number: int, suffix: str, *, fixed: str = "") -> Path:
    """Return the path of file ``number``, which begins with the fixed part of that name."""
    return directory / f"{number:06d}{f'+{fixed}' if fixed else ''}{suffix}"


def fixed_name_of(path: Path) -> str:
    """Return the name of the fixed part with which a file begins, "" for none."""
    return path.stem.partition("+")[2]


def fixed_file(directory: Path, name: str, suffix: str) -> Path:
    """Return the path of a fixed part of files with ``suffix``."""
    return directory / f"{name}{suffix}{_FIXED}"


def _fixed_of(path: Path) -> Path | None:
    name = fixed_name_of(path)
    return fixed_file(path.parent, name, path.suffix) if name else None


def make_fixed(
    directory: Path,
    name: str,
    suffix: str,
    nbytes: int,
    *,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Make the file of a fixed part, all zeros, where it is missing.

    Raises ``OSError``, and any error of ``check``, which is called meanwhile.
    """
    path = fixed_file(directory, name, suffix)
    if path.exists():
        return
    part = path.with_name(path.name + _UNFINISHED)
    part.unlink(missing_ok=True)
    make_file(part, nbytes, check=check).close()
    part.rename(path)


def make_numbered(
    path: Path, capacity: int, *, check: Callable[[], None] = lambda: None
) -> tuple[mmap.mmap, int]:
    """Make a file with room for ``capacity`` bytes behind its header and its fixed part.

    Returns the mapping, the fixed part not writable in it, and the part's length. Raises
    ``OSError``, and any error of ``check``.
    """
    mapping = make_file(path, HEADER_BYTES + capacity, check=check)
    if _fixed_of(path) is None:
        return mapping, 0
    mapping.close()
    try:
        return map_numbered(path)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def map_numbered(path: Path, *, fill: bool = False) -> tuple[mmap.mmap, int]:
    """Map a file; return the mapping, and the length of its fixed part.

    The part is writable with ``fill``. Raises ``OSError`` for a missing file, ``ValueError`` for an
    empty one.
    """
    if (part := _fixed_of(path)) is None:
        if (mapping := open_file(path)) is None:
            raise ValueError(f"{path}: the file is empty")
        return mapping, 0
    mapping = join_files(path, part, at=HEADER_BYTES, writable=fill)
    return mapping, len(mapping) - path.stat().st_size


def sweep_fixed(
    directory: Path, suffix: str, *, named: Collection[str], unfinished: bool = False
) -> None:
    """Remove the fixed parts of files with ``suffix`` that are not ``named``.

    With ``unfinished``, also those that a process was making when it died.
    """
    keep = {f"{name}{suffix}{_FIXED}" for name in named}
    for path in directory.glob(f"*{suffix}{_FIXED}"):
        if path.name not in keep:
            path.unlink(missing_ok=True)
    for path in directory.glob(f"*{suffix}{_FIXED}{_UNFINISHED}") if unfinished else ():
        path.unlink(missing_ok=True)


def fixed_bytes_in(directory: Path, suffix: str) -> int:
    """Return the bytes of all fixed parts of files with ``suffix``."""
    found = 0
    for path in directory.glob(f"*{suffix}{_FIXED}*"):
        with contextlib.suppress(OSError):
            found += path.stat().st_size
    return found
