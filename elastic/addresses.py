"""Addresses that a user gives: Holdfast and its sockets speak IPv4."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path

from holdfast.elastic.errors import ConfigError


def checked_host(host: str, *, given: str) -> str:
    """Return ``host``; ``given`` is the option or the variable that it comes from.

    Raises ``ConfigError`` for an IPv6 address, and for a name that has no other.
    """
    if ":" in host or (not _resolves(host, socket.AF_INET) and _resolves(host, socket.AF_INET6)):
        raise ConfigError(
            f"{given} {host}: Holdfast does not speak IPv6; give an IPv4 address of that machine, "
            "or a name that has one"
        )
    return host


def is_this_machine(host: str) -> bool:
    """Return whether ``host`` means the loopback: what is sent there stays on the machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def own_addresses() -> tuple[str, ...]:
    """Return this machine's IPv4 addresses; only that of the loopback where the kernel tells none.

    A connection to another machine may come from any of them.
    """
    found = {"127.0.0.1"}
    with contextlib.suppress(OSError):
        words: list[str] = []
        for line in Path("/proc/net/fib_trie").read_text().splitlines():
            before, words = words, line.split()
            if words[:3] == ["/32", "host", "LOCAL"] and before:
                found.add(before[-1])
    return tuple(sorted(found))


def _resolves(host: str, family: socket.AddressFamily) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None, family))
    except (OSError, UnicodeError):
        return False
