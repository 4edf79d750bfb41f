"""The process for which another one works on, and which may be started again."""

from __future__ import annotations

import contextlib
import os

from holdfast.ckpt.descriptors import readable


class OwnerWatch:
    """Tells whether the owner that was named last is alive. For one thread."""

    def __init__(self) -> None:
        self._pidfd = -1

    def follow(self, pid: int) -> None:
        """Watch this process from now on; a number that is no process counts as a dead owner."""
        self.close()
        with contextlib.suppress(OSError, OverflowError):
            self._pidfd = os.pidfd_open(pid)

    def lives(self, wait_s: float) -> bool:
        """Wait a moment, less if it ends or is gone; return whether it is alive."""
        return self._pidfd >= 0 and not readable([self._pidfd], wait_s)

    def close(self) -> None:
        """Watch nobody."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = -1
