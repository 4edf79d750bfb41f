"""The etcd program that members run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from holdfast.elastic.errors import ConfigError

ETCD_ENV: Final = "HOLDFAST_ETCD"
"""Environment variable that names the program."""

_LEAST: Final = (3, 4, 0)
_DIVERGING: Final = frozenset({(3, 5, 0), (3, 5, 1), (3, 5, 2)})
_ASK_S: Final = 20.0
_REMEDY: Final = (
    "install etcd 3.4 or newer on every machine of the job (Debian: etcd-server), or name the "
    f"program with --etcd FILE or {ETCD_ENV}"
)


def etcd_program(given: str = "") -> Path:
    """Return the etcd to run: the given one, that of ``HOLDFAST_ETCD``, or that on the PATH.

    Raises ``ConfigError`` if there is none, or none that is fit.
    """
    named = given or os.environ.get(ETCD_ENV, "")
    found = shutil.which(named or "etcd")
    if found is None:
        what = f"{named}: not a program" if named else "no etcd is on the PATH"
        raise ConfigError(f"{what}, and --coordinator managed runs one: {_REMEDY}")
    version = _version(Path(found))
    if version < _LEAST:
        raise ConfigError(f"{found} is etcd {_text(version)}: {_REMEDY}")
    if version in _DIVERGING:
        raise ConfigError(
            f"{found} is etcd {_text(version)}, whose members can come to disagree when one is "
            "killed: install 3.5.3 or newer"
        )
    return Path(found).absolute()


def _version(program: Path) -> tuple[int, ...]:
    try:
        said = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} does not tell its version ({error}): {_REMEDY}") from error
    if found := re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", said):
        return tuple(map(int, found.groups()))
    raise ConfigError(f"{program} does not tell the version of an etcd: {_REMEDY}")


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
