"""Limits of processor time and memory by control groups: possible parents, files and values.

After the kernel's Documentation/admin-guide/cgroup-v2.rst (``cpu.max``, ``memory.max``) and, for
the first version, Documentation/scheduler/sched-bwc.rst (``cpu.cfs_quota_us``) and
Documentation/admin-guide/cgroup-v1/memory.rst (``memory.limit_in_bytes``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, Literal, TypeAlias

import msgspec

PERIOD_US: Final = 100_000
"""The kernel's default period, in which a group may run for its quota."""

LEAST: Final = 0.01
"""Smallest share of a processor; the kernel accepts no quota below a millisecond."""

PROCESSES: Final = "cgroup.procs"
ENABLED: Final = "cgroup.subtree_control"
"""File that lists the controllers of the groups below, in the second version."""

Controller: TypeAlias = Literal["cpu", "memory"]


class Hierarchy(msgspec.Struct, frozen=True, kw_only=True):
    """A tree of groups that can limit processor time or memory.

    ``mount`` is its mount point, ``top`` the group at the mount point.
    """

    version: Literal[1, 2]
    mount: Path
    top: PurePosixPath = PurePosixPath("/")
    controller: Controller = "cpu"

    def group_of(self, membership: str) -> Path | None:
        """Return the folder of the group in a ``/proc/PID/cgroup``; None if not mounted."""
        for line in membership.splitlines():
            _, controllers, path = line.split(":", 2)
            ours = (
                not controllers if self.version == 2 else self.controller in controllers.split(",")
            )
            if ours and PurePosixPath(path).is_relative_to(self.top):
                return self.mount / PurePosixPath(path).relative_to(self.top)
        return None

    def parents(self, membership: str) -> Iterator[Path]:
        """Yield possible parents of a new group: the process's own group, then its ancestors."""
        group = self.group_of(membership)
        while group is not None:
            yield group
            group = None if group == self.mount else group.parent

    def limits(self, amount: float) -> dict[str, str]:
        """Return file → content for a limited group, in write order.

        ``amount`` is in processors, or in MiB of memory.
        """
        if self.controller == "memory":
            name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
            return {name: str(round(amount * (1 << 20)))}
        quota_us = round(amount * PERIOD_US)
        if self.version == 2:
            return {"cpu.max": f"{quota_us} {PERIOD_US}"}
        return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}


def hierarchies(mountinfo: str, controller: Controller = "cpu") -> list[Hierarchy]:
    """Return the trees in ``/proc/self/mountinfo``, the first version before the second.

    If both are mounted, the first has the controller: otherwise it would not be mounted with it.
    """
    found: list[Hierarchy] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        words, (kind, _, options) = before.split(), after.split(maxsplit=2)
        top, mount = PurePosixPath(words[3]), Path(words[4].replace("\\040", " "))
        if kind == "cgroup2":
            found.append(Hierarchy(version=2, mount=mount, top=top, controller=controller))
        elif kind == "cgroup" and controller in options.split(","):
            found.append(Hierarchy(version=1, mount=mount, top=top, controller=controller))
    return sorted(found, key=lambda each: each.version)
