"""Free ports of the loopback address."""

from __future__ import annotations

import contextlib
import random
import socket

_FIRST, _LAST = 12_000, 30_000
_TRIES = 1000


def free_ports(count: int) -> list[int]:
    """Return ``count`` different free ports.

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
    raise AssertionError(f"no {count} free ports between {_FIRST} and {_LAST}")
