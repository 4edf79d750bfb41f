"""Three calls by which any training loop reports its steps, their samples, and its state.

They write to the folder in the environment's `HISTORY`: one file per process, one line per call,
each in a single write. Without the variable they do nothing. They import nothing else of Holdfast.

An *attempt* is the work of the job's processes between two restarts. Its number must grow with
every restart and be the same in all processes. It combines the number of the job's own start
(`ATTEMPT`, set by its launcher) with torchrun's restart count, unless the caller gives another,
such as a generation.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

GATE: Final = "HOLDFAST_CHAOS_GATE"
"""Environment variable with a file; until it is there, ready workloads train slowly."""

HISTORY: Final = "HOLDFAST_HISTORY"
ATTEMPT: Final = "HOLDFAST_ATTEMPT"
PATTERN: Final = "history-*.jsonl"

_RESTARTS: Final = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_STARTS_APART: Final = 1_000_000

_files: dict[int, int] = {}


def step(step: int, *, rank: int | None = None, attempt: int | None = None) -> None:
    """Report that ``step`` is complete: a restart must continue from its update."""
    _write("step", step, rank, attempt)


def samples(
    step: int,
    ids: Iterable[int | str],
    *,
    epoch: int = 0,
    rank: int | None = None,
    attempt: int | None = None,
) -> None:
    """Report the samples on which this rank trains in ``step``, before the step is complete.

    Within an ``epoch`` an id names one sample.
    """
    if HISTORY in os.environ:
        _write("samples", step, rank, attempt, ids=list(ids), epoch=epoch)


def state_hash(
    step: int,
    state: str | Mapping[str, Any],
    *,
    rank: int | None = None,
    attempt: int | None = None,
) -> None:
    """Report the state after ``step``: a digest, or a state of which `digest` makes one."""
    if HISTORY in os.environ:
        found = state if isinstance(state, str) else digest(state)
        _write("state", step, rank, attempt, digest=found)


def digest(state: Mapping[str, Any]) -> str:
    """Return a digest of every bit of a state: tensors, numbers, texts, and mappings of them.

    Raises ``TypeError`` for a value of any other kind.
    """
    whole = hashlib.blake2b(digest_size=16)
    _add(whole, "", state)
    return whole.hexdigest()


def _add(whole: hashlib.blake2b, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _add(whole, f"{name}/{key}", value[key])
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _add(whole, f"{name}/{number}", each)
    elif hasattr(value, "detach"):
        local = value.to_local() if hasattr(value, "to_local") else value
        plain = local.detach().cpu().contiguous().reshape(-1)
        whole.update(f"{name}:{tuple(value.shape)}:{value.dtype}".encode())
        whole.update(plain.view(_bytes_of(plain)).numpy().tobytes())
    elif value is None or isinstance(value, bool | int | float | str):
        whole.update(f"{name}={value!r}".encode())
    else:
        raise TypeError(f"{name}: a {type(value).__name__} has no digest; leave it out")


def _bytes_of(tensor: Any) -> Any:
    import torch

    return torch.uint8 if tensor.numel() else tensor.dtype


def _write(kind: str, step: int, rank: int | None, attempt: int | None, **more: Any) -> None:
    folder = os.environ.get(HISTORY)
    if folder is None:
        return
    line = {
        "t": time.time(),
        "kind": kind,
        "step": int(step),
        "rank": int(os.environ.get("RANK", "0")) if rank is None else rank,
        "attempt": _attempt() if attempt is None else attempt,
        **more,
    }
    os.write(_file(Path(folder)), json.dumps(line, separators=(",", ":")).encode() + b"\n")


def _attempt() -> int:
    restarts = (os.environ[name] for name in _RESTARTS if name in os.environ)
    return int(os.environ.get(ATTEMPT, "0")) * _STARTS_APART + int(next(restarts, "0"))


def _file(folder: Path) -> int:
    """Return this process's own file; a forked child has another one than its parent."""
    pid = os.getpid()
    if pid not in _files:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"history-{socket.gethostname()}-{pid}-{time.time_ns():x}.jsonl"
        _files[pid] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    return _files[pid]
