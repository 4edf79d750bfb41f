"""The addresses at which processes listen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

LISTENS = "0A"


def listening(pids: set[int]) -> Iterator[tuple[str, int]]:
    """Yield the addresses and ports, as in the kernel's table, at which processes listen."""
    owned = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed in this moment
                owned.add(str(fd.readlink()))
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and f"socket:[{rest[5]}]" in owned:
                address, port = local.split(":")
                yield address, int(port, 16)
