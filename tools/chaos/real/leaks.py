"""Search for a job's leftovers.

It looks for processes, shared memory, open file handles of this process, keys in the job's etcd,
and files among its checkpoints that no step needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from holdfast.tools.chaos.real.jobs import RealJob
from holdfast.tools.chaos.real.keys import left_keys
from holdfast.tools.chaos.real.objects import Objects
from holdfast.tools.leftovers import leftovers, processes_of

_SHM: Final = Path("/dev/shm")
_OWN_HANDLES: Final = Path("/proc/self/fd")
_HANDLES_SLACK: Final = 16
"""File handles that a process may open once and keep, as contexts of libraries do."""


class Leaks:
    """Watches a job from before its start, and reports its leftovers at the end.

    ``words`` are the job's strings (`jobs.words`), ``work`` is the folder that it works in.
    """

    def __init__(self, job: RealJob, words: Iterable[str], *, work: Path) -> None:
        self._job, self._mark = job, job.mark
        self._objects = Objects(words, work)
        self._mapped: set[Path] = set()
        self._handles = _handles()

    def look(self) -> None:
        """Record the shared memory that the job's processes have now."""
        for pid in processes_of(self._mark):
            self._mapped |= _mapped(pid)

    def ended(self, *, well: bool, hurt: bool) -> list[str]:
        """Return the leftovers shortly after the job's end; ``hurt`` says whether it was struck."""
        found = leftovers(self._mark)
        if self._job.run:
            found += [each for each in leftovers(self._job.run) if each not in found]
        shared = (str(path) for path in sorted(self._mapped) if path.exists())
        found += [f"shared memory {each}" for each in shared if not any(each in f for f in found)]
        problems = [f"left behind: {each}" for each in found]
        problems += left_keys(self._job.coordinator, self._job.run)
        return problems + self._objects.left(ended_well=well, hurt=hurt)

    def closed(self) -> list[str]:
        """Return a message if file handles remain open after everything is closed."""
        more = _handles() - self._handles
        if more <= _HANDLES_SLACK:
            return []
        return [f"left behind: {more} open file handles in the process that ran it"]


def _handles() -> int:
    return len(list(_OWN_HANDLES.iterdir()))


def _mapped(pid: int) -> set[Path]:
    """Return the shared memory files that a process has mapped and that still have a name."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {
            Path(line[line.index(str(_SHM)) :])
            for line in lines
            if f"{_SHM}/" in line and not line.endswith(" (deleted)")
        }
    return set()
