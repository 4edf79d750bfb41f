"""Namespaces of the kernel around a process and all that it forks: a sandbox without a program.

A user who may create user namespaces needs no other right for it. The processes inside see no
other process and no shared memory of others. They have no network, and may write only where they
are told; all of them are killed with the first of them, however they hide. They still read the
user's files, and are not kept from each other: it contains accidents, and is no jail for malice.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from holdfast.adapters.rl.environments.process_settings import ProcessConfig
from holdfast.ckpt.descriptors import readable

SCRATCH: Final = "/dev/shm"
"""The directory for temporary files inside: empty, in memory, at most `SCRATCH_BYTES` in all."""

SCRATCH_BYTES: Final = 256 << 20

_NEW_NET, _NEW_PID, _NEW_USER, _NEW_IPC, _NEW_NS = (
    0x4000_0000,
    0x2000_0000,
    0x1000_0000,
    0x0800_0000,
    0x0002_0000,
)
_SET_DEATH_SIGNAL, _SET_NO_NEW_PRIVS = 1, 38
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MOUNT_SETATTR: Final = 442  # the same number on every architecture
_AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = -100, 0x8000, 1
_CAPABILITY_VERSION: Final = 0x2008_0522
_ORPHANED_STATUS: Final = 137

_TRY_S: Final = 30.0
_TRY: Final = f"""
import sys, msgspec
from {__name__} import ProcessConfig, enter
sys.stdout.buffer.write(msgspec.json.encode(enter(ProcessConfig())))
"""

ALL: Final = ("processes", "network", "files")
"""The protection of a sandbox: from seeing and signalling others, from the network, of files."""


class _MountAttributes(ctypes.Structure):
    """The kernel's ``struct mount_attr``."""

    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def enter(config: ProcessConfig) -> dict[str, str]:
    """Put this process into a sandbox; return the protection that it lacks, each with the reason.

    A fork of the calling process returns from here; that waits for its end, and ends likewise.
    The calling process must have one thread.
    """
    if config.sandbox == "off":
        return {}
    user, group = os.getuid(), os.getgid()
    flags = _NEW_USER | _NEW_PID | _NEW_IPC | _NEW_NS | (0 if config.network else _NEW_NET)
    wanted = [each for each in ALL if each != "network" or not config.network]
    if number := _refusal(flags, user, group):
        return dict.fromkeys(wanted, f"no user namespaces ({os.strerror(number)})")
    _divide(flags, user, group)
    _become_first()
    missing = {}
    try:
        _protect_files(config.writable)
    except OSError as error:
        missing["files"] = f"no mounts ({error})"
    _drop_capabilities()
    return missing


def lacking() -> dict[str, str]:
    """Return the protection that a sandbox of this user lacks on this machine, with the reasons."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _TRY], capture_output=True, timeout=_TRY_S, check=False
    )
    try:
        return msgspec.json.decode(done.stdout, type=dict[str, str])
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return dict.fromkeys(ALL, said[-1] if said else f"exit status {done.returncode}")


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process with its parent; end now if that is another one already."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_ORPHANED_STATUS)


def _refusal(flags: int, user: int, group: int) -> int:
    """Return the number of the error with which the kernel refuses the namespaces, 0 for none.

    A fork tries it, as a process that got only a part of them could not go back.
    """
    child = os.fork()
    if not child:
        try:
            _divide(flags, user, group)
        except OSError as error:
            os._exit(error.errno or errno.EPERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _divide(flags: int, user: int, group: int) -> None:
    """Enter new namespaces, in which the user's and the group's numbers are the same."""
    _call("unshare", flags)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _become_first() -> None:
    """Go on as the first process of the new namespace: all others end with it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        _stand_for(child, keep=writer)
    os.close(writer)
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if readable([reader], 0.0):  # the parent has ended, before it was of any consequence here
        os._exit(_ORPHANED_STATUS)
    os.close(reader)


def _stand_for(child: int, *, keep: int) -> NoReturn:
    """Wait for the end of the first process, with no descriptor open that others wait on."""
    os.closerange(3, keep)
    os.closerange(keep + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _protect_files(writable: Sequence[str]) -> None:
    """Make all files read-only but those of ``writable``; give this a `SCRATCH` of its own."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    for each in writable:
        _mount(each, each, None, _MS_BIND | _MS_REC)
    _set("/", read_only=True)
    for each in writable:
        _set(each, read_only=False)
    options = f"size={SCRATCH_BYTES},mode=1777"
    _mount("tmpfs", SCRATCH, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    try:
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    except OSError as error:
        if error.errno != errno.EPERM:  # a container that hides parts of /proc does not permit it
            raise


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if each is None else each.encode() for each in (source, target, kind)]
    try:
        _call("mount", *words, ctypes.c_ulong(flags), data.encode() or None)
    except OSError as error:
        raise OSError(error.errno, error.strerror, target) from None


def _set(path: str, *, read_only: bool) -> None:
    wanted = _MountAttributes(
        set=_READ_ONLY if read_only else 0, clear=0 if read_only else _READ_ONLY
    )
    arguments = (_AT_FDCWD, path.encode(), _AT_RECURSIVE)
    try:
        _call("syscall", _MOUNT_SETATTR, *arguments, ctypes.byref(wanted), ctypes.sizeof(wanted))
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def _drop_capabilities() -> None:
    """Give up all rights inside the namespaces, for this process and what it executes."""
    _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises ``OSError`` if it fails."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
