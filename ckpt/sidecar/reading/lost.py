"""A lost block whose fragments are found, and the count of bytes requested of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.memory.block import block_bytes
from holdfast.ckpt.memory.records import BlockEntry
from holdfast.ckpt.parity.stripes import BlockRecovery
from holdfast.ckpt.sidecar.core.messages import OpenBlock
from holdfast.ckpt.sidecar.reading.decoding import Decoding
from holdfast.ckpt.sidecar.reading.sources import Sources


class LostBlock:
    """A block that can be decoded, whole or in parts, while the nodes of its ``plan`` live.

    ``index`` is its index JSON, once decoded. ``asked_bytes`` tells the caller when parts cost more
    than the whole. `close` may be called while a part is read.
    """

    def __init__(
        self,
        body: OpenBlock,
        sources: Sources,
        work: Decoding,
        plan: tuple[BlockRecovery, ...],
        entries: Mapping[int, BlockEntry],
    ) -> None:
        self.body, self.work, self.plan, self.entries = body, work, plan, entries
        self.asked_bytes, self.index = 0, b""
        self._sources = sources
        self._lock = threading.Lock()
        self._closed = False

    @property
    def entry(self) -> BlockEntry:
        """The entry of the sealed block."""
        return self.work.entry

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Decode ``(offset, length)`` ranges; the reader checks them against the chunks' checksums.

        Raises ``NotFoundError`` for a range outside the block, and that or ``PeerError`` when a
        fragment is no longer available.
        """
        limit, at = block_bytes(self.entry), 0
        data = memoryview(bytearray(sum(max(nbytes, 0) for _, nbytes in ranges)))
        parts = []
        for offset, nbytes in ranges:
            if offset < 0 or nbytes < 0 or offset + nbytes > limit:
                raise NotFoundError(f"bytes {offset}+{nbytes} are outside a block of {limit:,}")
            parts.append(data[at : at + nbytes])
            at += nbytes
        with self._lock:
            if self._closed:
                raise NotFoundError(
                    f"the block of rank {self.entry.rank} is not being read in parts"
                )
            try:
                first = (offset for offset, _ in ranges)
                self.work.read(self.plan, list(zip(first, parts, strict=True)))
            finally:
                if self._closed:
                    self._sources.close()
        return parts

    def close(self) -> None:
        """Close connections and files."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._sources.close()
            finally:
                self._lock.release()
