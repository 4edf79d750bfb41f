"""Addresses at which a reader serves: the loopback, unless a host is given."""

from __future__ import annotations

import argparse
import ipaddress
import re
import socket
from typing import Final, NamedTuple

LOOPBACK: Final = "127.0.0.1"
_PLACE: Final = re.compile(r"(?:(\[[0-9a-fA-F:.]+\]|[^:\[\]/\s]+):)?(\d{1,5})")


class ServedPlace(NamedTuple):
    """A host, as a name or an address without brackets, and a port, 0 for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return it as it is written in an address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """The family of its address."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def is_local(self) -> bool:
        """True if only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def place_of(text: str) -> ServedPlace:
    """Parse ``[HOST:]PORT``; an argparse type."""
    found = _PLACE.fullmatch(text)
    if not found or int(found[2]) >= 1 << 16:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not [HOST:]PORT, as in 9400 or 0.0.0.0:9400 or [::1]:9400"
        )
    return ServedPlace((found[1] or LOOPBACK).strip("[]"), int(found[2]))
