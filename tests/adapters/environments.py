"""Virtual environments of other libraries, by name, made on first use and kept for later runs.

Holdfast's own environment has none of these libraries. A test converts in its own process and runs
the other library's script with `python` of an environment here. For scripts that import Holdfast,
the environment has Holdfast's dependencies, and its processes see this checkout. The environments
lie in ``HOLDFAST_ENVIRONMENTS``, or in the user's cache, outside of the repository.

    python tests/adapters/environments.py deepspeed    makes one and prints its interpreter
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SWITCH: Final = "HOLDFAST_ADAPTERS"
FOLDER: Final = "HOLDFAST_ENVIRONMENTS"

INSTALL_S: Final = 1800

_REPOSITORY: Final = Path(__file__).parents[2]
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The pinned requirements of an environment, and variables for building and running it.

    With ``holdfast`` its processes import Holdfast from this checkout.
    """

    requirements: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    holdfast: bool = False

    @property
    def installed(self) -> tuple[str, ...]:
        """Return the requirements with those of Holdfast, if its processes import it."""
        return (*self.requirements, *(_needs_of_holdfast() if self.holdfast else ()))

    @property
    def digest(self) -> str:
        """Return a name that changes with anything that is installed."""
        text = repr((sys.version, self.installed, sorted(self.variables.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _needs_of_holdfast() -> list[str]:
    """Return Holdfast's dependencies in the versions of ``constraints.txt``."""
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]
    names = {_normal(need) for need in project["dependencies"]}
    pins = (_REPOSITORY / "constraints.txt").read_text().splitlines()
    return [pin for pin in pins if "==" in pin and _normal(pin) in names]


def _normal(requirement: str) -> str:
    found = _NAME.match(requirement)
    return found[0].lower().replace("_", "-") if found else ""


ENVIRONMENTS: Final[Mapping[str, Environment]] = {
    "bitsandbytes": Environment(
        requirements=("torch==2.13.0", "bitsandbytes==0.50.2"), holdfast=True
    ),
    "deepspeed": Environment(
        requirements=("torch==2.13.0", "numpy==2.4.6", "deepspeed==0.19.8"),
        variables={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
    ),
    "torchtitan": Environment(
        # torchtitan imports triton, which a torch for CPUs does not bring along
        requirements=(
            *("torch==2.13.0", "torchtitan==0.3.0", "datasets==4.7.0", "torchdata==0.11.0"),
            *("tokenizers==0.23.3", "safetensors==0.8.0", "triton==3.7.1"),
        ),
        variables={"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"},
        holdfast=True,
    ),
    "trackers": Environment(
        requirements=(
            *("torch==2.13.0", "tensorboard==2.21.0", "wandb==0.31.0", "mlflow-skinny==3.17.2"),
            *("sqlalchemy==2.1.9", "alembic==1.20.1", "sqlparse==0.6.1"),  # MLflow's database
        ),
        variables={"WANDB_SILENT": "true", "WANDB_CONSOLE": "off"},
        holdfast=True,
    ),
    "lightning": Environment(
        requirements=("torch==2.13.0", "lightning==2.6.6", "tensorboard==2.21.0"),
        holdfast=True,
    ),
    "trl": Environment(
        requirements=(
            *("torch==2.13.0", "trl==1.16.0", "peft==0.21.2", "datasets==5.2.0"),
            *("transformers==5.23.0", "accelerate==1.15.0", "tensorboard==2.20.0"),
        ),
        variables={"HF_HUB_OFFLINE": "1"},
        holdfast=True,
    ),
    "ray": Environment(
        requirements=(
            *("torch==2.13.0", "ray==2.60.0"),
            *("aetcd==1.0.0", "grpcio==1.85.1", "protobuf==7.36.2"),  # the extra etcd
        ),
        variables={"RAY_USAGE_STATS_ENABLED": "0"},
        holdfast=True,
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
    chosen = ENVIRONMENTS[name]
    if chosen.holdfast:
        kept["PYTHONPATH"] = str(_REPOSITORY / "src")
    return {**kept, "OMP_NUM_THREADS": "1", **chosen.variables}


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
            *chosen.installed,
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
