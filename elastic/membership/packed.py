"""Compressed text of large records. Pure.

The record of a generation names every member and node several times. etcd takes no request of more
than 1.5 MiB, and every node reads the record. Compressed, it has less than a third of its size.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Final

PACKED_FROM: Final = 16 << 10
"""Length of a text from which on it is compressed."""

MOST_BYTES: Final = 256 << 20
"""The most that a compressed text may hold."""

_MARK: Final = "zlib:"  # no JSON begins so


def pack(text: str) -> str:
    """Return the text, compressed if it is long; `unpack` is the other way."""
    if len(text) < PACKED_FROM:
        return text
    return _MARK + base64.b64encode(zlib.compress(text.encode(), 1)).decode()


def unpack(text: str) -> str | bytes:
    """Return the text that was given to `pack`, or its UTF-8.

    Raises ``ValueError`` for what `pack` does not make, and for more than `MOST_BYTES`.
    """
    if not text.startswith(_MARK):
        return text
    try:
        packed = base64.b64decode(text[len(_MARK) :], validate=True)
        opened = zlib.decompressobj()
        data = opened.decompress(packed, MOST_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"damaged compressed text: {error}") from error
    if not opened.eof or opened.unused_data:
        raise ValueError(f"compressed text is cut, or of more than {MOST_BYTES} bytes")
    return data
