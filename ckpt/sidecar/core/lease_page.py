"""Until when a node may act: one number in memory that its agent and its sidecar share.

The agent renews the node's lease and moves the time on; the sidecar reads it whenever a writer
wants something. So a sidecar whose agent is stopped, or cut off from the coordinator, takes nothing
more once others may have been told to replace the node, and nobody has to tell it.
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
        """Whether the node's right to act was not renewed in time."""
        return 0 < self._cells[0] < time.monotonic_ns()

    def extend(self, until_ns: int) -> None:
        """Let the node act until then, on the monotonic clock (agent only)."""
        self._cells[0] = until_ns
