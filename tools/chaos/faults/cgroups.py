"""Limits of processor time by control groups: possible parents, files and values.

After the kernel's Documentation/admin-guide/cgroup-v2.rst (``cpu.max``) and, for the first version,
Documentation/scheduler/sched-bwc.rst (``cpu.cfs_quota_us``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import msgspec

PERIOD_US: Final = 100_000
"""The kernel's default period, in which a group may run for its quota."""

LEAST: Final = 0.01
"""Smallest share of a processor; the kernel accepts no quota below a millisecond."""

PROCESSES: Final = "cgroup.procs"
ENABLED: Final = "cgroup.subtree_control"
"""File that lists the controllers of the groups below, in the second version."""


class Hierarchy(msgspec.Struct, frozen=True, kw_only=True):
    """A tree of groups that can limit processor time.

    ``mount`` is its mount point, ``top`` the group at the mount point.
    """

    version: Literal[1, 2]
    mount: Path
    top: PurePosixPath = PurePosixPath("/")

    def group_of(self, membership: str) -> Path | None:
        """Return the folder of the group in a ``/proc/PID/cgroup``; None if not mounted."""
        for line in membership.splitlines():
            _, controllers, path = line.split(":", 2)
            ours = not controllers if self.version == 2 else "cpu" in controllers.split(",")
            if ours and PurePosixPath(path).is_relative_to(self.top):
                return self.mount / PurePosixPath(path).relative_to(self.top)
        return None

    def parents(self, membership: str) -> Iterator[Path]:
        """Yield possible parents of a new group: the process's own group, then its ancestors."""
        group = self.group_of(membership)
        while group is not None:
            yield group
            group = None if group == self.mount else group.parent

    def limits(self, share: float) -> dict[str, str]:
        """Return file → content for a group that may use ``share`` processors, in write order."""
        quota_us = round(share * PERIOD_US)
        if self.version == 2:
            return {"cpu.max": f"{quota_us} {PERIOD_US}"}
        return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}


def hierarchies(mountinfo: str) -> list[Hierarchy]:
    """Return the trees in ``/proc/self/mountinfo``, the first version before the second.

    If both are mounted, the first has the controller: otherwise it would not be mounted with
    ``cpu``.
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
