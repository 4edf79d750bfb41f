"""The machine of a sidecar, as whoever compares nodes wants to know it."""

from __future__ import annotations

import functools
import platform
import shutil
import time
from pathlib import Path

from holdfast.ckpt.types import Json


def machine(shared: Path) -> dict[str, Json]:
    """Return the wall clock, the versions of software, and the size of shared memory.

    ``shared`` is a directory in it. ``time_s`` is in seconds since 1970.
    """
    room = shutil.disk_usage(shared)
    return {
        "time_s": time.time(),
        "versions": dict(_versions()),
        "shared_bytes": room.total,
        "shared_free_bytes": room.free,
    }


@functools.cache
def _versions() -> dict[str, str]:
    from importlib import metadata  # only where somebody asks: it takes a while to import

    found = {"python": platform.python_version()}
    for package in ("holdfast", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
