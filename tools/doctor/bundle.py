"""The bundle for a bug report: what a run left and what the doctor found, without secrets."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.text import Text

from holdfast.ckpt.errors import NotFoundError
from holdfast.elastic.agent.reporting import PROCESSES_PATTERN, read_all_processes
from holdfast.elastic.agent.stacks import kernel_state
from holdfast.elastic.channel.shared_key import shared_key_file
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events.log import EVENTS_PATTERN
from holdfast.elastic.launch.run_folder import KEY
from holdfast.tools.chaos.real.stacks import spied
from holdfast.tools.doctor.facts import PlanFacts
from holdfast.tools.doctor.findings import Finding
from holdfast.tools.doctor.reading import environment_versions
from holdfast.tools.doctor.secrets import Redactor, secrets_of
from holdfast.tools.environment import machine
from holdfast.tools.show.node_status import NodeStatus
from holdfast.tools.terminal import readable

MOST_BYTES: Final = 64 << 20
LEAST_BYTES: Final = 1 << 20
"""The least that a bundle may be told to take: what is not from files needs some of it."""

_PATTERNS: Final = (
    EVENTS_PATTERN,
    PROCESSES_PATTERN,
    "logs/*.log",
    "logs/*.log.1",
    "tracebacks-*",
    "holdfast.toml",
)
_SETTINGS: Final = "holdfast.toml"
_VARIABLES: Final = (
    *("HOLDFAST_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MKL_", "SLURM_"),
    *("HF_", "AWS_", "PYTHON", "RAY_", "WANDB_", "MLFLOW_", "OTEL_"),
)
_FOLDER: Final = "holdfast-report"
_MOST_NAMED: Final = 100


class PackedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the bundle; of one that was too large the ``left_out_bytes`` oldest are missing."""

    name: str
    nbytes: int
    left_out_bytes: int = 0


class PackedBundle(msgspec.Struct, frozen=True, kw_only=True):
    """A written bundle: its files, the removed secrets, and files of the run that are not in it."""

    bundle: str
    nbytes: int
    files: tuple[PackedFile, ...]
    removed: dict[str, int]
    not_inside: tuple[str, ...]


def pack(
    bundle: Path,
    run_dir: Path,
    *,
    findings: Sequence[Finding],
    nodes: Sequence[NodeStatus],
    plan: PlanFacts,
    most_bytes: int = MOST_BYTES,
) -> PackedBundle:
    """Write the bundle and return its contents.

    ``most_bytes`` bounds the content before compression. Raises ``ConfigError`` for a name that is
    taken or is no ``.tar.gz``, and ``NotFoundError`` without a run directory.
    """
    if not bundle.name.endswith((".tar.gz", ".tgz")):
        raise ConfigError(f"--bundle {bundle}: give a name that ends in .tar.gz")
    if bundle.exists():
        raise ConfigError(f"--bundle {bundle}: it is there already; choose another name")
    if most_bytes < LEAST_BYTES:
        raise ConfigError(f"--bundle-size {most_bytes}: give {LEAST_BYTES} bytes or more")
    if not run_dir.is_dir():
        raise NotFoundError(f"{run_dir}: no such directory; give that of the job")
    redactor = Redactor({**secrets_of(os.environ), **_keys(run_dir)})
    made = _made(run_dir, findings, nodes, plan, redactor)
    content = {name: redactor.text(text).encode() for name, text in made}
    most_each = most_bytes // 2 // len(content)
    content = {name: data[:most_each] for name, data in content.items()}
    files = [PackedFile(name=name, nbytes=len(data)) for name, data in content.items()]
    left_bytes = most_bytes - sum(map(len, content.values()))
    fresh = bundle.with_name(f".{bundle.name}.new")
    try:
        with tarfile.open(fresh, "x:gz") as archive:
            fresh.chmod(0o600)
            for name, data in content.items():
                _add(archive, name, data)
            for path, share in _shares(_files(run_dir), left_bytes):
                data, left_out = _tail(path, share, redactor)
                name = _name_of(path, run_dir)
                files.append(PackedFile(name=name, nbytes=len(data), left_out_bytes=left_out))
                _add(archive, name, data)
            result = PackedBundle(
                bundle=str(bundle),
                nbytes=0,
                files=tuple(files),
                removed=dict(sorted(redactor.removed.items())),
                not_inside=tuple(_others(run_dir)),
            )
            _add(archive, "contents.json", msgspec.json.format(msgspec.json.encode(result)))
        os.link(fresh, bundle)
    finally:
        fresh.unlink(missing_ok=True)
    return msgspec.structs.replace(result, nbytes=bundle.stat().st_size)


def _keys(run_dir: Path) -> dict[str, str]:
    """Return the texts of the job's keys, as secrets with their names."""
    found: dict[str, str] = {}
    for path in (run_dir / KEY, shared_key_file()):
        try:
            parts = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError):
            continue
        found |= {value: f"key of the run ({name})" for name, value in parts.items()}
    return found


def _made(
    run_dir: Path,
    findings: Sequence[Finding],
    nodes: Sequence[NodeStatus],
    plan: PlanFacts,
    redactor: Redactor,
) -> Iterator[tuple[str, str]]:
    """Yield the parts that are no files of the run: their names and texts."""
    chosen = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    parts: dict[str, Any] = {
        "findings.json": list(findings),
        "statuses.json": {node.node: node for node in nodes},
        "plan.json": plan,
        "versions.json": {"machine": machine(), "packages": environment_versions()},
        "environment.json": redactor.variables(dict(sorted(chosen.items()))),
    }
    for name, content in parts.items():
        yield name, msgspec.json.format(msgspec.json.encode(content)).decode()
    yield "stacks.txt", "\n".join(_stacks(run_dir)) or "no process of the job lives here\n"


def _stacks(run_dir: Path) -> Iterator[str]:
    """Yield the state of the job's processes on this machine, with stacks if py-spy gives them."""
    for node, found in read_all_processes(run_dir).items():
        pids = {"agent": found.agent, "sidecar": found.sidecar, **found.workers}
        for name, pid in pids.items():
            if pid and (state := kernel_state(pid)):
                yield f"{node} {name}, process {pid}: {state}\n{spied(pid)}"


def _files(run_dir: Path) -> list[Path]:
    """Return the files of the run that belong into a bundle; links are left out."""
    found = [path for pattern in _PATTERNS for path in sorted(run_dir.glob(pattern))]
    settings = Path(_SETTINGS)
    if settings.is_file() and not (run_dir / _SETTINGS).exists():
        found.append(settings)
    return [path for path in found if path.is_file() and not path.is_symlink()]


def _name_of(path: Path, run_dir: Path) -> str:
    if path.is_relative_to(run_dir):
        return f"run/{path.relative_to(run_dir).as_posix()}"
    return path.name


def _others(run_dir: Path) -> Iterator[str]:
    """Yield the files of the run directory that are not in the bundle."""
    packed = set(_files(run_dir))
    others = (
        path.relative_to(run_dir).as_posix()
        for path in run_dir.rglob("*")
        if path.is_symlink() or (path.is_file() and path not in packed)
    )
    first = list(islice(others, _MOST_NAMED + 1))
    yield from sorted(first[:_MOST_NAMED])
    if first[_MOST_NAMED:]:
        yield "and more"


def _shares(paths: Sequence[Path], most_bytes: int) -> Iterator[tuple[Path, int]]:
    """Yield the files with the bytes that each may take: small ones whole, the others alike."""
    sized = sorted((path.stat().st_size, path) for path in paths)
    for number, (size_bytes, path) in enumerate(sized):
        share = min(size_bytes, most_bytes // (len(sized) - number))
        most_bytes -= share
        yield path, share


def _tail(path: Path, most_bytes: int, redactor: Redactor) -> tuple[bytes, int]:
    """Return the newest lines of a file without secrets, and the bytes before them.

    A line that would be cut is left out whole: half a secret is not recognised.
    """
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        start = max(0, size_bytes - most_bytes)
        file.seek(max(0, start - 1))
        data = file.read(most_bytes + (start > 0))
    if start:
        _, _, data = data.partition(b"\n")
    left_out = size_bytes - len(data)
    text = redactor.text(data.decode(errors="replace")).encode()
    if len(text) > most_bytes:  # marks are longer than some secrets
        whole = text.find(b"\n", len(text) - most_bytes - 1) + 1
        return text[whole or len(text) :], left_out + whole
    return text, left_out


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(f"{_FOLDER}/{name}")
    entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
    archive.addfile(entry, io.BytesIO(data))


def show_packed(shown: Console, packed: PackedBundle) -> None:
    """Print the contents of a bundle: look at them before you send it."""
    shown.print(Text(f"{packed.bundle}: {readable(packed.nbytes)}", style="bold"))
    for each in packed.files:
        line = f"  {each.name}: {readable(each.nbytes)}"
        if each.left_out_bytes:
            line += f", without the oldest {readable(each.left_out_bytes)}"
        shown.print(Text(line))
    if packed.not_inside:
        shown.print(Text(f"not inside: {', '.join(packed.not_inside)}"))
    words = [f"{count} {kind}" for kind, count in packed.removed.items()]
    shown.print(Text(f"removed: {', '.join(words) or 'no secret was found'}"))
    shown.print(Text("look through it before you send it: a secret in plain words is not found"))
