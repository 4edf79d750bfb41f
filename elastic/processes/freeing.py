"""The freeing of a dead process's memory, which yields to the processes that go on.

The kernel frees the memory of a killed process in the process's own time: a tenth of a second of a
core for a worker with a few hundred MiB of its own and as much again mapped. Meanwhile all ranks
wait for their survivors, which need the cores to restore.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

NICE: Final = 10
"""Freeing yields, but goes on beside processes that use all cores: a next worker needs room."""

_MEMINFO: Final = Path("/proc/meminfo")


def yield_freeing(pid: int, *, meminfo: Path = _MEMINFO) -> None:
    """Lower the priority at which the memory of ``pid`` is freed, unless memory is scarce.

    Call it for a process that will run no instruction any more. Does nothing for one that is gone.
    """
    if not _is_ample(meminfo):
        return
    with contextlib.suppress(OSError):  # it is gone, or this process may not
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(task.name), NICE)


def _is_ample(meminfo: Path) -> bool:
    """Return whether half of the machine's memory is available."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available, total = (int(fields[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return False
    return 2 * available >= total
