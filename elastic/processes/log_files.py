"""Log files that other processes write: their bound and their end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

MOST_BYTES: Final = 32 << 20
"""Size at which a file is emptied; its content until then stays beside it, as ``NAME.1``."""


def bound(path: Path, *, most_bytes: int = MOST_BYTES) -> None:
    """Keep a file that is appended to within its bound; never raises ``OSError``.

    The writer keeps its descriptor, so the content is copied and the file emptied. Without room for
    the copy the content is lost, which makes room.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size <= most_bytes:
            return
        before = path.with_name(f"{path.name}.1")
        try:
            before.unlink(missing_ok=True)
            _copy(path, before)
        except OSError:
            before.unlink(missing_ok=True)
        os.truncate(path, 0)


def _copy(source: Path, target: Path) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb", buffering=0) as out, source.open("rb", buffering=0) as file:
        while part := file.read(1 << 20):
            while part:
                part = part[out.write(part) :]


def last_words(log: Path, *, most: int = 1000) -> str:
    """Return the end of a log, at most ``most`` characters; "" where there is none."""
    try:
        return log.read_text(errors="replace")[-most:].strip()
    except OSError:
        return ""
