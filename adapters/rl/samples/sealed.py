"""Texts with their own digest in front, for files that others write."""

from __future__ import annotations

import hashlib
from typing import Final

from holdfast.ckpt.errors import CorruptError

DIGEST_BYTES: Final = 16


def sealed(data: bytes) -> bytes:
    """Return ``data`` behind a line with its digest."""
    return f"{_digest(data)}\n".encode() + data


def opened(found: bytes, *, where: str) -> bytes:
    """Return the data of a file that `sealed` made.

    Raises ``CorruptError``, which names ``where``, if it has other bytes than its digest says.
    """
    stated, _, data = found.partition(b"\n")
    if stated.decode("ascii", "replace") != _digest(data):
        raise CorruptError(f"{where}: its bytes are not those of its digest; remove the file")
    return data


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
