"""The reading of a machine's facts; nothing is changed on it."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.adapters.rl.environments.processes.sandbox import lacking
from holdfast.ckpt.memory.arena import ARENA_ROOT
from holdfast.ckpt.native import isal, streaming
from holdfast.ckpt.native.pages import SHMEM_HUGE
from holdfast.ckpt.torch_versions import objection
from holdfast.tools.doctor.facts import UNLIMITED, MachineFacts, ProcessLimit
from holdfast.tools.environment import cores, memory_bytes, software

_CONTROL_ROOT: Final = Path("/sys/fs/cgroup")
_CLOCK: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_RDMA: Final = Path("/dev/infiniband")
_NO_LIMIT: Final = 1 << 60
"""A control group of version 1 without a limit has a number of this size."""

_READS: Final = 2000


def read_machine(*, shared: Path = ARENA_ROOT) -> MachineFacts:
    """Return the facts of this machine, as this process sees them."""
    room = _disk_usage(shared)
    memory = _memory()
    control = _ControlGroup()
    found, isal_error = _isal()
    versions = software(("holdfast", "torch"))
    tasks = _tasks()
    return MachineFacts(
        kernel=os.uname().release,
        cores=cores(),
        memory_bytes=memory_bytes(),
        free_bytes=memory.get("MemAvailable", 0),
        shared_place=str(shared),
        shared_bytes=room[0],
        shared_free_bytes=room[1],
        files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC, used=tasks),
        locked=_limit(resource.RLIMIT_MEMLOCK),
        rdma=_RDMA.is_dir(),
        privileged=os.getuid() == 0,
        huge=_chosen(_text(SHMEM_HUGE)),
        swap_bytes=memory.get("SwapTotal", 0),
        swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
        control_bytes=control.memory_bytes,
        control_used_bytes=control.used_bytes,
        control_cores=control.cores,
        control_processes=control.processes,
        isal=found,
        isal_error=isal_error,
        copy=streaming.kernel() is not None,
        compiler=_compiler(),
        versions=versions,
        objection=objection(versions["torch"], os.environ) if "torch" in versions else "",
        clock=_text(_CLOCK),
        clock_ns=_clock_ns(),
        unprotected=lacking(),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _chosen(modes: str) -> str:
    """Return the word in brackets of ``always [never] force``."""
    return modes.partition("[")[2].partition("]")[0]


def _disk_usage(place: Path) -> tuple[int, int]:
    try:
        found = shutil.disk_usage(place)
    except OSError:
        return 0, 0
    return found.total, found.free


def _limit(number: int, *, used: int = 0) -> ProcessLimit:
    soft, hard = (
        UNLIMITED if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(number)
    )
    return ProcessLimit(soft=soft, hard=hard, used=used)


def _memory() -> dict[str, int]:
    """Return the sizes of /proc/meminfo, in bytes."""
    found = {}
    for line in _text(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _tasks() -> int:
    """Return the number of this user's processes and threads."""
    count, user = 0, str(os.getuid())
    for path in Path("/proc").glob("[0-9]*/status"):
        fields = dict(line.partition(":")[::2] for line in _text(path).splitlines())
        if fields.get("Uid", "").split()[:1] == [user]:
            count += int(fields.get("Threads", "1"))
    return count


class _ControlGroup:
    """The limits of this process's control group, of either version, and of those above it."""

    def __init__(self) -> None:
        places = {
            kind: path
            for line in _text(Path("/proc/self/cgroup")).splitlines()
            for _, kinds, path in [line.split(":", 2)]
            for kind in kinds.split(",")
        }
        self._unified = places.get("", "/")
        self._places = places
        memory = ("memory.max", "memory.limit_in_bytes")
        self.memory_bytes = min(self._limits("memory", *memory), default=UNLIMITED)
        self.used_bytes = self._used()
        self.processes = min(self._limits("pids", "pids.max", "pids.max"), default=UNLIMITED)
        self.cores = min(self._quotas(), default=float(UNLIMITED))

    def _folders(self, kind: str) -> Iterator[tuple[Path, bool]]:
        """Yield the group's folder and those above it, with True for the unified hierarchy."""
        for root, place, unified in (
            (_CONTROL_ROOT, self._unified, True),
            (_CONTROL_ROOT / "unified", self._unified, True),
            (_CONTROL_ROOT / kind, self._places.get(kind, "/"), False),
        ):
            folder = root / place.lstrip("/")
            while folder.is_relative_to(root):
                yield folder, unified
                folder = folder.parent

    def _limits(self, kind: str, unified: str, old: str) -> Iterator[int]:
        for folder, is_unified in self._folders(kind):
            text = _text(folder / (unified if is_unified else old))
            if text.isdecimal() and int(text) < _NO_LIMIT:
                yield int(text)

    def _used(self) -> int:
        """Return the bytes in use; file pages that can be dropped at once do not count."""
        for folder, is_unified in self._folders("memory"):
            used = _text(folder / ("memory.current" if is_unified else "memory.usage_in_bytes"))
            if used.isdecimal():
                name = "inactive_file" if is_unified else "total_inactive_file"
                stat = dict(
                    line.partition(" ")[::2] for line in _text(folder / "memory.stat").splitlines()
                )
                return max(0, int(used) - int(stat.get(name, "0")))
        return 0

    def _quotas(self) -> Iterator[float]:
        for folder, is_unified in self._folders("cpu"):
            if is_unified:
                words = _text(folder / "cpu.max").split()
            else:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                words = [_text(folder / name) for name in names]
            if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
                yield int(words[0]) / int(words[1])


def _isal() -> tuple[str, str]:
    """Return the version of ISA-L, or why there is none."""
    try:
        number = int(isal.library().isal_get_version())
    except OSError as error:
        return "", str(error)
    return f"{number >> 16}.{number >> 8 & 0xFF}.{number & 0xFF}", ""


def _compiler() -> str:
    words = (sysconfig.get_config_var("CC") or "cc").split()
    return next((name for name in (words[0], "cc", "gcc", "clang") if shutil.which(name)), "")


def _clock_ns() -> float:
    """Return the time that reading the monotonic clock takes: the best of some tries."""
    best = float("inf")
    for _ in range(5):
        began = time.monotonic_ns()
        for _ in range(_READS):
            time.monotonic_ns()
        best = min(best, (time.monotonic_ns() - began) / _READS)
    return best


def environment_versions() -> dict[str, str]:
    """Return Python and all installed distributions with their versions."""
    from importlib import metadata

    found = {"python": sys.version.split()[0]}
    for each in metadata.distributions():
        with contextlib.suppress(KeyError, TypeError):  # one that is half removed
            found[each.metadata["Name"]] = each.version
    return dict(sorted(found.items()))
