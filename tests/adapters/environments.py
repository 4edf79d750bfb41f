"""Virtual environments of other libraries, by name, made on first use and kept for later runs.

Holdfast's own environment has none of these libraries. A test converts in its own process and runs
the other library's script with `python` of an environment here. The environments lie in
``HOLDFAST_ENVIRONMENTS``, or in the user's cache, outside of the repository.

    python tests/adapters/environments.py deepspeed    makes one and prints its interpreter
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SWITCH: Final = "HOLDFAST_ADAPTERS"
FOLDER: Final = "HOLDFAST_ENVIRONMENTS"

INSTALL_S: Final = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The pinned requirements of an environment, and variables for building and running it."""

    requirements: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Return a name that changes with anything that is installed."""
        text = repr((sys.version, self.requirements, sorted(self.variables.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


_SOURCE: Final = Path(__file__).parents[2] / "src"

_HOLDFAST: Final = (
    *("torch==2.13.0", "numpy==2.4.6", "cryptography==50.0.2", "pyeclib==1.8.0", "msgspec==0.22.0"),
    *("pyzmq==27.3.0", "zarr==3.1.6", "numcodecs==0.16.6", "ml_dtypes==0.6.0", "rich==15.0.0"),
    *("jinja2==3.1.6", "lazy_loader==0.6", "aetcd==1.0.0", "grpcio==1.85.1", "protobuf==7.36.2"),
)
"""The packages that Holdfast needs, as in constraints.txt, and those of its extra etcd."""

ENVIRONMENTS: Final[Mapping[str, Environment]] = {
    "deepspeed": Environment(
        requirements=("torch==2.13.0", "numpy==2.4.6", "deepspeed==0.19.8"),
        variables={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
    ),
    "ray": Environment(
        requirements=(*_HOLDFAST, "ray==2.60.0"),
        variables={"PYTHONPATH": str(_SOURCE), "RAY_USAGE_STATS_ENABLED": "0"},
    ),
}
"""Every environment by its name. A version here is one that the guides call tested."""


class CannotMakeError(Exception):
    """The environment cannot be made here; the message says why."""


def wanted() -> bool:
    """Say whether tests that need an environment run (``make adapters`` sets the switch)."""
    return os.environ.get(SWITCH) == "1"


def python(name: str) -> Path:
    """Return the interpreter of an environment, which is made if need be.

    Raises ``CannotMakeError``.
    """
    chosen = ENVIRONMENTS[name]
    place = _folder() / f"{name}-{chosen.digest}"
    found = place / "bin" / "python"
    with _lock(place):
        if not (place / "installed").exists():
            shutil.rmtree(place, ignore_errors=True)
            _make(chosen, place)
            (place / "installed").touch()
    return found


def variables(name: str) -> dict[str, str]:
    """Return the variables for a process in an environment, without those of this interpreter."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "OMP_NUM_THREADS": "1", **ENVIRONMENTS[name].variables}


def _folder() -> Path:
    if given := os.environ.get(FOLDER):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "holdfast" / "environments"


@contextmanager
def _lock(place: Path) -> Iterator[None]:
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(chosen: Environment, place: Path) -> None:
    commands = [
        [sys.executable, "-m", "venv", str(place)],
        [
            *(str(place / "bin" / "python"), "-m", "pip", "install", "--quiet"),
            "--disable-pip-version-check",
            *chosen.requirements,
        ],
    ]
    for command in commands:
        try:
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=INSTALL_S,
                env={**os.environ, **chosen.variables},
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise CannotMakeError(f"{' '.join(command[:4])} failed: {said[-500:]}") from error


if __name__ == "__main__":
    print(python(sys.argv[1]))
