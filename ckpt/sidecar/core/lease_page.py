"""The time until which a node may act: one number in memory shared by its agent and its sidecar.

The agent renews the node's lease and moves the time forward; the sidecar reads it at each request
of a writer. So a sidecar whose agent is stopped, or cut off from the coordinator, accepts nothing
more once others may replace the node, and no message is needed.
"""

from __future__ import annotations

import mmap
import os
import time

_PAGE_BYTES = 4096


class LeasePage:
    """A mapping of the page; the agent creates it, the sidecar attaches to the inherited fd."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _PAGE_BYTES)
        self._cells = memoryview(self._map).cast("q")  # aligned, one writer: reads need no lock

    @classmethod
    def create(cls, name: str) -> LeasePage:
        """Make a page that sets no limit yet; ``name`` only shows in ``/proc``."""
        fd = os.memfd_create(f"holdfast-lease-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE_BYTES)
        return cls(fd)

    @property
    def expired(self) -> bool:
        """True if the node's right to act has expired."""
        return 0 < self._cells[0] < time.monotonic_ns()

    def extend(self, until_ns: int) -> None:
        """Let the node act until then, in nanoseconds of the monotonic clock (agent only)."""
        self._cells[0] = until_ns
