"""`holdfast inspect`: show what a checkpoint holds, without reading its tensors."""

from __future__ import annotations

import argparse
import sys
from math import prod
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from ckpt.catalog import StepInfo, choose, locate, open_store, quick_verify, steps
from ckpt.manifest import Manifest
from ckpt.types import Json
from ckpt.zarr_dtypes import dtype_of

if TYPE_CHECKING:
    from tools.cli import Subparsers

_SHOWN_VALUES = 40
_WIDTH = 160


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what a checkpoint holds",
        description="Shows the steps below a directory, and the tensors, plain values and layout "
        "of one of them. Reads no tensor.",
    )
    parser.add_argument("path", metavar="PATH", help="the root of checkpoints, or one step of it")
    parser.add_argument("--step", type=int, help="the step to show (default: the newest verified)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the description."""
    root, named = locate(args.path)
    step = choose(root, named if args.step is None else args.step)
    manifest = quick_verify(open_store(root), step)
    if args.json:
        sys.stdout.write(msgspec.json.encode(describe(manifest, steps(root))).decode() + "\n")
    else:
        show(manifest, steps(root), console=_console())
    return 0


def _console() -> Console:
    """Return a console that is wide where no terminal limits it."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def tensor_bytes(manifest: Manifest, fqn: str) -> int:
    """Return the size of a tensor."""
    tensor = manifest.tensors[fqn]
    return prod(tensor.shape) * dtype_of(tensor.dtype, origin=fqn).itemsize


def describe(manifest: Manifest, there: list[StepInfo]) -> Json:
    """Return the description as JSON."""
    return {
        "format": manifest.format,
        "run": manifest.run,
        "step": manifest.step,
        "generation": manifest.generation,
        "mesh": manifest.mesh,
        "world_size": manifest.world_size,
        "created_by": manifest.created_by,
        "steps": [info.step for info in there if info.committed],
        "unfinished_steps": [info.step for info in there if not info.committed],
        "bytes": sum(tensor_bytes(manifest, fqn) for fqn in manifest.tensors),
        "stored_bytes": sum(record.nbytes for record in manifest.files()),
        "files": [msgspec.to_builtins(record) for record in manifest.files()],
        "tensors": {
            fqn: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "chunk": tensor.cell,
                "bytes": tensor_bytes(manifest, fqn),
            }
            for fqn, tensor in manifest.tensors.items()
        },
        "aliases": manifest.aliases,
        "values": manifest.values,
    }


def show(manifest: Manifest, there: list[StepInfo], *, console: Console) -> None:
    """Print the description for people."""
    summary = Table.grid(padding=(0, 2))
    stored = sum(record.nbytes for record in manifest.files())
    size = sum(tensor_bytes(manifest, fqn) for fqn in manifest.tensors)
    mesh = " x ".join(f"{axis}={n}" for axis, n in manifest.mesh.items()) or "none"
    rows = {
        "step": f"{manifest.step}  (there: {_steps(there)})",
        "run": f"{manifest.run or '(saved by ckpt.save)'}, generation {manifest.generation}",
        "mesh": f"{mesh}, saved by {manifest.world_size} rank(s)",
        "size": f"{readable(size)} in {len(manifest.tensors)} tensors, "
        f"{readable(stored)} in {len(list(manifest.files())) + 1} files",
        "written by": ", ".join(f"{name} {v}" for name, v in manifest.created_by.items()),
    }
    for name, text in rows.items():
        summary.add_row(f"[bold]{name}[/bold]", text)
    console.print(summary)
    tensors = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("tensor", "dtype", "shape", "chunk"):
        tensors.add_column(title, overflow="fold")
    tensors.add_column("size", justify="right")
    for fqn, tensor in manifest.tensors.items():
        tensors.add_row(
            fqn, tensor.dtype, _shape(tensor.shape), _shape(tensor.cell), _size_of(manifest, fqn)
        )
    for alias, fqn in manifest.aliases.items():
        tensors.add_row(alias, f"= {fqn}", "", "", "")
    console.print(tensors, markup=False)
    values = Table(box=None, header_style="bold", pad_edge=False)
    values.add_column("value", no_wrap=True)
    values.add_column("", overflow="ellipsis", no_wrap=True)
    shown = list(manifest.values.items())[:_SHOWN_VALUES]
    for name, value in shown:
        values.add_row(name, msgspec.json.encode(value).decode())
    if left := len(manifest.values) - len(shown):
        values.add_row(f"… and {left} more (--json shows all)", "")
    if manifest.values:
        console.print(values, markup=False)


def _size_of(manifest: Manifest, fqn: str) -> str:
    return readable(tensor_bytes(manifest, fqn))


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _steps(there: list[StepInfo]) -> str:
    names = [str(info.step) + ("" if info.committed else " unfinished") for info in there]
    return ("… " if len(names) > 10 else "") + ", ".join(names[-10:])


def readable(nbytes: float) -> str:
    """Return a size in the unit that fits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
