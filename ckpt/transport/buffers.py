"""A pool of memory for frames in transfer: writing to warm pages is several times faster."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict, deque

import numpy as np
from numpy.typing import NDArray

from holdfast.ckpt.errors import BusyError

_Block = NDArray[np.uint8]

_SMALL_BYTES = 64 << 10


class Buffers:
    """Lends memory, which returns by itself when the last view of it is gone.

    It keeps up to ``keep_bytes`` for the next borrower. `check` refuses a request that would bring
    the lent bytes above ``limit_bytes``, or one owner's above a quarter of that. Safe to share
    between threads.
    """

    def __init__(self, *, keep_bytes: int, limit_bytes: int | None = None) -> None:
        self._keep_bytes, self._limit_bytes = keep_bytes, limit_bytes
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)
        self._kept_bytes = 0
        self._lent_to: Counter[bytes] = Counter()
        self._lent_bytes = 0
        # Views may die in any thread, even inside one of our own critical sections when garbage is
        # collected there. So returned memory is only queued, without a lock.
        self._returned: deque[tuple[_Block, bytes]] = deque()

    def take(self, nbytes: int, *, owner: bytes = b"") -> memoryview:
        """Return ``nbytes`` of writable memory, of any contents."""
        size = _rounded(nbytes)
        with self._lock:
            self._collect()
            if self._free[size]:
                block = self._free[size].pop()
                self._kept_bytes -= size
            else:
                block = np.empty(size, np.uint8)
            self._lent_bytes += size
            self._lent_to[owner] += size
        lease = block[:nbytes]
        weakref.finalize(lease, self._returned.append, (block, owner)).atexit = False
        return lease.data

    def check(self, nbytes: int, *, owner: bytes) -> None:
        """Raise `BusyError` where ``owner`` may not borrow ``nbytes`` more now."""
        if self._limit_bytes is None:
            return
        whole, share = self._limit_bytes, self._limit_bytes // 4
        with self._lock:
            self._collect()
            lent, own = self._lent_bytes, self._lent_to.get(owner, 0)
        if lent + nbytes > whole or own + nbytes > share:
            raise BusyError(
                f"{lent:,} bytes are unanswered, {own:,} of them by this client; at most "
                f"{whole:,} and {share:,} may be: retry later"
            )

    @property
    def lent_bytes(self) -> int:
        """The number of bytes lent now."""
        with self._lock:
            self._collect()
            return self._lent_bytes

    @property
    def kept_bytes(self) -> int:
        """The number of bytes kept for the next borrower."""
        with self._lock:
            self._collect()
            return self._kept_bytes

    def _collect(self) -> None:
        while self._returned:
            block, owner = self._returned.popleft()
            self._lent_bytes -= block.nbytes
            self._lent_to[owner] -= block.nbytes
            if not self._lent_to[owner]:
                del self._lent_to[owner]
            if self._kept_bytes + block.nbytes <= self._keep_bytes:
                self._free[block.nbytes].append(block)
                self._kept_bytes += block.nbytes


def _rounded(nbytes: int) -> int:
    """Return a size that other requests share, an eighth larger at most."""
    grain = max(_SMALL_BYTES, 1 << max(0, nbytes.bit_length() - 3))
    return max(1, -(-nbytes // grain)) * grain
