"""Poor surroundings of a command, in namespaces of its own: the rest of the machine stays as it is.

After namespaces(7). Without root a user namespace gives the right to mount.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.tools.chaos.scenarios.scenario import JobSurroundings, ScenarioError

_SHARED: Final = Path("/dev/shm")
_TEMPORARY: Final = "tmp"
_FIRST_USER: Final = 54_321
_OF_KERNEL: Final = ("/proc", "/sys", "/dev")
_OF_USER: Final = ("HOME", "USER", "LOGNAME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME")

_REMEDY: Final = "run it as root, or where users may create user namespaces (unshare)"


def within(
    wanted: JobSurroundings, argv: tuple[str, ...], *, folder: Path, work: Path
) -> tuple[str, ...]:
    """Return a command that runs ``argv`` in the wanted surroundings.

    ``folder`` is the run's own, ``work`` the folder in it that belongs to the command. Raises
    ``ScenarioError`` if this process may not make them.
    """
    if wanted == JobSurroundings():
        return argv
    if wanted.temporary_kib is not None:
        (work / _TEMPORARY).mkdir(exist_ok=True)
    mountinfo = Path("/proc/self/mountinfo").read_text()
    wrap = wrapped(wanted, folder=folder, work=work, mountinfo=mountinfo, root=os.geteuid() == 0)
    if shutil.which(wrap[0]) is None:
        raise ScenarioError(f"workload.surroundings: there is no {wrap[0]}; install util-linux")
    tried = subprocess.run([*wrap, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
        raise ScenarioError(f"workload.surroundings cannot be made ({why}): {_REMEDY}")
    return (*wrap, *argv)


def wrapped(
    wanted: JobSurroundings, *, folder: Path, work: Path, mountinfo: str, root: bool
) -> tuple[str, ...]:
    """Return the words before a command; ``mountinfo`` is that of /proc/self."""
    temporary = work / _TEMPORARY
    script = [*_mounts(wanted, folder, temporary, mountinfo)]
    words = ["unshare", "--mount", *([] if root else ["--user", "--map-root-user"])]
    if wanted.open_files is not None:
        script.append(f"ulimit -n {wanted.open_files}")
    if wanted.temporary_kib is not None:
        script.append(f"export TMPDIR={shlex.quote(str(temporary))}")
    words += ["sh", "-c", " && ".join([*script, 'exec "$@"']), "sh"]
    if wanted.homeless:
        user = str(unknown_user())
        words += ["unshare", "--user", f"--map-user={user}", f"--map-group={user}"]
        words += ["env", *(word for name in _OF_USER for word in ("-u", name))]
    return tuple(words)


def unknown_user() -> int:
    """Return the number of a user who has no entry in the password database."""
    known = {entry.pw_uid for entry in pwd.getpwall()}
    return next(number for number in range(_FIRST_USER, 1 << 16) if number not in known)


def _mounts(
    wanted: JobSurroundings, folder: Path, temporary: Path, mountinfo: str
) -> Iterator[str]:
    if wanted.shared_memory_mib is not None:
        yield _file_system(_SHARED, f"{wanted.shared_memory_mib}m")
    if wanted.read_only:
        yield shlex.join(["mount", "--bind", str(folder), str(folder)])
        for point in _points(mountinfo):
            if point != str(folder):
                yield shlex.join(["mount", "-o", "remount,bind,ro", point])
    if wanted.temporary_kib is not None:
        yield _file_system(temporary, f"{wanted.temporary_kib}k")


def _file_system(point: Path, size: str) -> str:
    return shlex.join(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(point)])


def _points(mountinfo: str) -> list[str]:
    """Return the places where file systems other than the kernel's own are mounted."""
    points = (line.split()[4].replace("\\040", " ") for line in mountinfo.splitlines())
    return sorted({point for point in points if not _is_kernels(point)})


def _is_kernels(point: str) -> bool:
    return any(point == each or point.startswith(f"{each}/") for each in _OF_KERNEL)
