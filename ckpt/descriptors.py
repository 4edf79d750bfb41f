"""File descriptors: waiting for any number of them, and the limit of their number.

``select.select`` refuses descriptors above 1023, which a coordinator of some hundred nodes reaches.
"""

from __future__ import annotations

import contextlib
import math
import resource
import select
from collections.abc import Iterable
from typing import Final

_ENOUGH: Final = 1 << 16


def readable(fds: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until a descriptor can be read, has ended or failed; return those, none in time."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(math.ceil(max(0.0, timeout_s) * 1000))]


def allow_many() -> None:
    """Raise the soft limit of open descriptors as far as the hard one permits, up to 65,536.

    Children inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
