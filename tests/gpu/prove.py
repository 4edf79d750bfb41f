"""Prove the CUDA path on a machine with a device: its facts, the tests in this folder, figures.

    python tests/gpu/prove.py --json figures.json

The tests come first. ``--device cpu`` tries the script itself on a machine without a device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from holdfast.tools.bench.data_path.snapshot import CALL, COPY, FENCED, SnapshotTrainer
from holdfast.tools.bench.nodes import Nodes

ROUNDS = 5
STEP_PRODUCTS = 200


def facts(device: torch.device) -> dict[str, Any]:
    """Return what tells two machines apart."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["devices"] = torch.cuda.device_count()
        found["nccl"] = list(cast(Any, torch.cuda.nccl).version())
    return found


def run_tests() -> int:
    """Run the tests of this folder in a process of their own; return its exit code."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", str(here), "-q", "--durations=10", "-rs"]
    return subprocess.run(command, check=False).returncode


def settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of ``work`` and of all that it asked the device for."""
    found = []
    for _ in range(ROUNDS):
        settled(device)
        began_s = time.perf_counter()
        work()
        settled(device)
        found.append(time.perf_counter() - began_s)
    return median(found)


def figures(device: torch.device, size_bytes: int) -> list[dict[str, Any]]:
    """Time snapshots of ``size_bytes`` on the device into the memory of a real sidecar."""
    count = 16
    tensors = [torch.rand(size_bytes // count // 4, device=device) for _ in range(count)]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    pinned = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in tensors]
    model = nn.ParameterList(nn.Parameter(tensor) for tensor in tensors)
    state: Any = SimpleNamespace(tracked={"model": model})
    square = torch.rand(1024, 1024, device=device)

    def plain() -> None:
        for tensor, room in zip(tensors, pinned, strict=True):
            room.copy_(tensor, non_blocking=True)

    def step() -> None:
        for _ in range(STEP_PRODUCTS if device.type == "cuda" else 2):
            torch.mm(square, square)

    rows = [{"row": "plain copy into pinned memory", "seconds": seconds_of(plain, device)}]
    rows.append({"row": "a step without a snapshot", "seconds": seconds_of(step, device)})
    with (
        tempfile.TemporaryDirectory() as directory,
        Nodes(Path(directory), ["a"]) as nodes,
        closing(SnapshotTrainer(nodes, state)) as trainer,
    ):
        rows.append({"row": "first copy, slots registered", "seconds": trainer.warm_up()})
        taken = [trainer.take() for _ in range(ROUNDS)]
        for name in (CALL, FENCED, COPY):
            rows.append({"row": name, "seconds": median(each[name] for each in taken)})
        beside = []
        for _ in range(ROUNDS):
            trainer.step += 1
            settled(device)
            began_s = time.perf_counter()
            trainer.snapshots.snapshot(state.tracked, trainer.step)
            step()
            settled(device)
            beside.append(time.perf_counter() - began_s)
            trainer.snapshots.fence()
        rows.append({"row": "snapshot() and a step beside the copy", "seconds": median(beside)})
    for row in rows:
        if "step" not in str(row["row"]):
            row["GB_per_s"] = round(nbytes / cast(float, row["seconds"]) / 1e9, 2)
    return rows


def main() -> int:
    """Run the parts in their order; return 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cpu tries this script alone")
    parser.add_argument("--size-mib", type=int, default=4096, help="of the state (4096)")
    parser.add_argument("--json", type=Path, help="file for the facts and figures")
    parser.add_argument("--figures-only", action="store_true", help="leave the tests out")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --device cpu tries this script alone")
    report: dict[str, Any] = {"facts": facts(device)}
    sys.stdout.write(json.dumps(report["facts"]) + "\n")
    report["tests"] = 0 if given.figures_only else run_tests()
    report["rows"] = figures(device, given.size_mib << 20)
    for row in report["rows"]:
        speed = f"{row['GB_per_s']:8.2f} GB/s" if "GB_per_s" in row else ""
        sys.stdout.write(f"{row['row']:<40}{row['seconds'] * 1e3:10.2f} ms {speed}\n")
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1))
    return int(report["tests"] != 0)


if __name__ == "__main__":
    sys.exit(main())
