"""Limits of processor time by control groups: where one can be made, which file, which value.

After the kernel's Documentation/admin-guide/cgroup-v2.rst (``cpu.max``) and, for the first version,
Documentation/scheduler/sched-bwc.rst (``cpu.cfs_quota_us``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import msgspec

PERIOD_US: Final = 100_000
"""The kernel's default: in each a group may run for its quota."""

LEAST: Final = 0.01
"""Of a processor; the kernel takes no quota below a millisecond."""

PROCESSES: Final = "cgroup.procs"
ENABLED: Final = "cgroup.subtree_control"
"""Names the controllers that the groups below have, in the second version."""


class Hierarchy(msgspec.Struct, frozen=True, kw_only=True):
    """A tree of groups that can limit processor time.

    ``mount`` is where it is seen, ``top`` the group that is seen there.
    """

    version: Literal[1, 2]
    mount: Path
    top: PurePosixPath = PurePosixPath("/")

    def group_of(self, membership: str) -> Path | None:
        """Return the folder of the group that ``/proc/PID/cgroup`` tells; None where unseen."""
        for line in membership.splitlines():
            _, controllers, path = line.split(":", 2)
            ours = not controllers if self.version == 2 else "cpu" in controllers.split(",")
            if ours and PurePosixPath(path).is_relative_to(self.top):
                return self.mount / PurePosixPath(path).relative_to(self.top)
        return None

    def parents(self, membership: str) -> Iterator[Path]:
        """Yield the groups below which one could be made: a process's own, and those above it."""
        group = self.group_of(membership)
        while group is not None:
            yield group
            group = None if group == self.mount else group.parent

    def limits(self, share: float) -> dict[str, str]:
        """Return file → content of a group that may use ``share`` processors, in this order."""
        quota_us = round(share * PERIOD_US)
        if self.version == 2:
            return {"cpu.max": f"{quota_us} {PERIOD_US}"}
        return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}


def hierarchies(mountinfo: str) -> list[Hierarchy]:
    """Return what ``/proc/self/mountinfo`` has, the first version before the second.

    Where both are mounted the first has the controller: else it would not be mounted with ``cpu``.
    """
    found: list[Hierarchy] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        words, (kind, _, options) = before.split(), after.split(maxsplit=2)
        top, mount = PurePosixPath(words[3]), Path(words[4].replace("\\040", " "))
        if kind == "cgroup2":
            found.append(Hierarchy(version=2, mount=mount, top=top))
        elif kind == "cgroup" and "cpu" in options.split(","):
            found.append(Hierarchy(version=1, mount=mount, top=top))
    return sorted(found, key=lambda each: each.version)
