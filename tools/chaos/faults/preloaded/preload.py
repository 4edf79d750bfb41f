"""The library that a job's processes load before the C library, and the rules it obeys.

`_preload.c` is compiled on the machine of the run. Its rules lie in a file that all processes map,
so a rule is in force everywhere from the next call until it is removed.
"""

from __future__ import annotations

import ctypes
import shlex
import shutil
import struct
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Final

from holdfast.tools.chaos.faults.environment import before
from holdfast.tools.chaos.faults.injector import JobAccess
from holdfast.tools.chaos.scenarios.scenario import ScenarioError

RULES: Final = "HOLDFAST_CHAOS_RULES"
FAIL, SLOW, TEAR, CLOCK, CUT, DELAY, FLIP = range(1, 8)
"""Kinds of rules, as in `_preload.c`."""

OPEN_NEW, OPEN_WRITE, WRITE, READ, SYNC, GROW, NAME = (1 << bit for bit in range(7))
"""Groups of calls, as in `_preload.c`."""

_SOURCE: Final = Path(__file__).with_name("_preload.c")
_RULES, _PIDS, _PORTS, _PATH_BYTES = 32, 64, 64, 512


class _Rule(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("ops", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("taken", ctypes.c_uint32),
        ("delay_ns", ctypes.c_int64),
        ("share", ctypes.c_double),
        ("since_ns", ctypes.c_int64),
        ("offset_ns", ctypes.c_int64),
        ("rate", ctypes.c_double),
        ("every_bytes", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("pids", ctypes.c_int32 * _PIDS),
        ("ports", ctypes.c_uint16 * _PORTS),
        ("folder", ctypes.c_char * _PATH_BYTES),
    )


_HEAD_BYTES: Final = 64
_NUMBER: Final = struct.Struct("=I")
_FLIPPED: Final = struct.Struct("=8xQ")
_LOCK: Final = threading.Lock()
"""All families of faults share the rules of a run."""


class Preload:
    """The library and the rules of one run, below its folder."""

    def __init__(self, site: JobAccess) -> None:
        """Compile, unless another family of faults has done so. Raises ``ScenarioError``."""
        folder = site.folder / "preload"
        folder.mkdir(parents=True, exist_ok=True)
        self._library, self._rules = folder / "preload.so", folder / "rules"
        if " " in str(self._library) or ":" in str(self._library):
            raise ScenarioError(
                f"{self._library}: LD_PRELOAD accepts no path with a space or a colon; choose "
                "another folder for the run"
            )
        if not self._library.exists():
            _compile(self._library)
            self._rules.write_bytes(bytes(_HEAD_BYTES + _RULES * ctypes.sizeof(_Rule)))

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment that the processes need."""
        return {
            "LD_PRELOAD": before("LD_PRELOAD", str(self._library)),
            RULES: str(self._rules),
        }

    @property
    def flipped_bits(self) -> int:
        """Number of bits changed on the wire so far, by all processes of the run."""
        with self._rules.open("rb", buffering=0) as file:
            return int(_FLIPPED.unpack(file.read(_FLIPPED.size))[0])

    def add(self, kind: int, pids: Iterable[int], **fields: Any) -> Callable[[], None]:
        """Put a rule in force for some processes and their children; return its removal."""
        rule = _Rule()
        _write_list(rule.pids, pids)
        _write_list(rule.ports, fields.pop("ports", ()))
        for name, value in fields.items():
            setattr(rule, name, value)
        with _LOCK, self._rules.open("r+b", buffering=0) as file:
            at = _free(file)
            _write(file, at, bytes(rule))
            _write(file, at, _NUMBER.pack(kind))  # last: the rule is in force from here on
            _count(file, 1)

        def take_back() -> None:
            with _LOCK, self._rules.open("r+b", buffering=0) as file:
                _write(file, at, _NUMBER.pack(0))
                _count(file, -1)

        return take_back


def _free(file: FileIO) -> int:
    """Return the offset of a free rule in the file."""
    for number in range(_RULES):
        at = _HEAD_BYTES + number * ctypes.sizeof(_Rule)
        file.seek(at)
        if not _NUMBER.unpack(file.read(_NUMBER.size))[0]:
            return at
    raise ScenarioError(f"more than {_RULES} faults at once; let some end before")


def _write(file: FileIO, at: int, found: bytes) -> None:
    file.seek(at)
    file.write(found)


def _count(file: FileIO, change: int) -> None:
    """Change the number of rules that the processes read."""
    file.seek(0)
    (active,) = _NUMBER.unpack(file.read(_NUMBER.size))
    _write(file, 0, _NUMBER.pack(active + change))


def _write_list(where: Any, values: Iterable[int]) -> None:
    """Write a list that ends with 0. Raises ``ScenarioError`` if it is too long."""
    found = list(values)
    if len(found) > len(where):
        raise ScenarioError(f"{len(found)} processes or ports at once, {len(where)} at most")
    for place, value in enumerate(found):
        where[place] = value


def _compile(library: Path) -> None:
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
    found = next((name for name in (compiler, "gcc", "cc", "clang") if shutil.which(name)), None)
    if found is None:
        raise ScenarioError(
            "faults of disks, clocks and networks need a C compiler on the PATH; install gcc"
        )
    made = library.with_suffix(".new")
    command = [found, "-O2", "-shared", "-fPIC", "-o", str(made), str(_SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        output = done.stderr.strip()[-2000:]
        raise ScenarioError(
            f"{_SOURCE.name} does not compile; Linux with glibc is needed:\n{output}"
        )
    made.rename(library)
