"""The environment of a result: versions of software, and the machine."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("holdfast", "torch", "numpy", "pyzmq", "pyeclib", "zarr", "reasoning-gym")


def software(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of those ``packages`` that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """Return the machine's system, processor, cores and memory, as far as they are known."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cores": str(cores()),
        "memory": f"{memory_bytes() / 2**30:.0f} GiB",
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Return the size of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def resident_bytes(field: str = "VmRSS") -> float:
    """Return the resident memory of this process; 0 where the system has no such ``field``."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return float(found[1]) * 1024 if found else 0.0


def processor() -> str:
    """Return the processor's model, or its architecture where the system does not name one."""
    return _of_processor("model name") or platform.machine()


def processor_features() -> list[str]:
    """Return the instruction sets that the processor announces, such as ``avx2``, sorted."""
    return sorted((_of_processor("flags") or _of_processor("Features")).split())


def _of_processor(field: str) -> str:
    """Return a field of the first core in ``/proc/cpuinfo``, empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() == field), "")


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used so far (``proc(5)``)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Return the processes that a process started and that are there, none if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found
