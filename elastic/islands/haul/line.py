"""One direction of an island's line: a pace for payloads, and the figures of those that went."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Self

from holdfast.ckpt.errors import StoreError
from holdfast.ckpt.sidecar.persist.bandwidth import Bucket
from holdfast.ckpt.store.paced import PacedParts
from holdfast.elastic.islands.messages import LineFigures

LEAST_PIECE_BYTES: Final = 16 << 10
MOST_PIECE_BYTES: Final = 4 << 20
_PIECE_S: Final = 0.25
_REMEMBERED_S: Final = 120.0
"""Seconds of transfers after which older ones count half."""


class PacedLine:
    """One direction; a rate of 0 is no limit. Safe to share between threads.

    ``nbytes`` counts all bytes of payloads that went. `pay` raises ``StoreError`` after `close`.
    """

    def __init__(
        self, bytes_per_s: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bytes_per_s, self._clock = bytes_per_s, clock
        self._bucket, self._closing = Bucket(bytes_per_s), threading.Event()
        self._lock = threading.Lock()
        self.nbytes = self._active = 0
        self._counted, self._busy_s, self._since_s = 0.0, 0.0, 0.0

    @property
    def piece_bytes(self) -> int:
        """The size of a piece: so small that a slow line moves it in a moment."""
        if not self.bytes_per_s:
            return MOST_PIECE_BYTES
        return min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, round(self.bytes_per_s * _PIECE_S)))

    @property
    def measured_per_s(self) -> float:
        """The bytes per second of late, of the time in which payloads went; 0 if none did."""
        with self._lock:
            running_s = self._clock() - self._since_s if self._active else 0.0
            busy_s = self._busy_s + running_s
            return self._counted / busy_s if busy_s > 0 else 0.0

    def pay(self, nbytes: int) -> None:
        """Count bytes that go, and wait as long as the pace demands before the next."""
        with self._lock:
            self.nbytes += nbytes
            self._counted += nbytes
            wait_s = self._bucket.pay(nbytes, now_s=self._clock())
        if self._closing.wait(wait_s) if wait_s > 0 else self._closing.is_set():
            raise StoreError("the payload is not needed any more: its transfer ends")

    @contextmanager
    def transfer(self) -> Iterator[Self]:
        """Yield the line; the time within counts as that of transfers."""
        with self._lock:
            if not self._active:
                self._since_s = self._clock()
            self._active += 1
        try:
            yield self
        finally:
            with self._lock:
                self._active -= 1
                if not self._active:
                    self._busy_s += self._clock() - self._since_s
                if self._busy_s > _REMEMBERED_S:
                    self._busy_s, self._counted = self._busy_s / 2, self._counted / 2

    def paced(self, payload: bytes) -> PacedParts:
        """Return a payload as parts of a file that go at this pace."""
        return PacedParts(
            payload, pay=self.pay, bytes_per_s=self.bytes_per_s, piece_bytes=self.piece_bytes
        )

    def close(self) -> None:
        """End the transfers under way at their next piece."""
        self._closing.set()

    def open(self) -> None:
        """Let transfers go again."""
        self._closing.clear()


@dataclass(frozen=True, slots=True)
class PacedLines:
    """Both directions of an island's line."""

    up: PacedLine = field(default_factory=PacedLine)
    down: PacedLine = field(default_factory=PacedLine)

    @classmethod
    def of(cls, up_per_s: int, down_per_s: int) -> PacedLines:
        """Return lines of so many bytes per second, 0 for no limit."""
        return cls(PacedLine(up_per_s), PacedLine(down_per_s))

    @property
    def figures(self) -> LineFigures:
        """The figures, as signs of life tell them."""
        return LineFigures(
            uplink=self.up.bytes_per_s,
            downlink=self.down.bytes_per_s,
            up=self.up.measured_per_s,
            down=self.down.measured_per_s,
        )
