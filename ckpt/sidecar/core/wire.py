"""Splitting and checking of bytes that sidecars and their clients exchange."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from holdfast.ckpt.errors import CorruptError, PeerError
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.types import Json

PART_BYTES = 4 << 20
"""The largest part in which blocks and fragments travel: a bound on buffers and delays."""


def split_checked(
    body: Json, frames: Sequence[memoryview], lengths: Sequence[int], *, origin: str
) -> list[memoryview]:
    """Cut a read answer's frame into its ranges, each checked against its CRC.

    Raises ``CorruptError`` when bytes changed in transfer, ``PeerError`` for a malformed answer.
    """
    if not isinstance(body, list) or len(body) != len(lengths) or len(frames) != 1:
        raise PeerError(f"{origin}: malformed answer to a read", peer_code=CorruptError.code)
    if frames[0].nbytes != sum(lengths):
        raise CorruptError(f"{origin}: sent {frames[0].nbytes} bytes, not {sum(lengths)}; retry")
    ends = list(accumulate(lengths))
    parts = [frames[0][end - nbytes : end] for end, nbytes in zip(ends, lengths, strict=True)]
    if [crc32c(part) for part in parts] != body:
        raise CorruptError(f"{origin}: bytes changed on the way; retry")
    return parts
