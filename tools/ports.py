"""Free ports of the loopback address, for servers that are started here."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from typing import Final

_FIRST, _LAST = 12_000, 30_000
_TRIES: Final = 1000


def free_ports(count: int) -> list[int]:
    """Return ``count`` different free ports. Raises ``OSError`` if none are found.

    They are below those that the kernel gives to outgoing connections: one of these could take the
    port of a server that is down, even by connecting to itself.
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(range(_FIRST, _LAST), _TRIES):
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise OSError(errno.EADDRINUSE, f"fewer than {count} free ports from {_FIRST} to {_LAST}")
