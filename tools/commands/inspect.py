"""`holdfast inspect`: show the content of a checkpoint without reading its tensors."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.ckpt.checkpoints.catalog import StepInfo, choose, quick_verify, steps
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.format.manifest import Manifest
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.neighbors.marks import in_words, marks_of
from holdfast.tools.commands.checkpoints import (
    add_path,
    add_select,
    add_step,
    chosen,
    pointed_at,
    require,
    tensor_bytes,
)
from holdfast.tools.commands.foreign import ForeignStep, open_foreign
from holdfast.tools.printing import json_text
from holdfast.tools.show import layout_map, names_tree
from holdfast.tools.subcommand import HelpFormatter, Subparsers
from holdfast.tools.terminal import console, print_json, readable, shape_text

_SHOWN_VALUES: Final = 40
_VALUE_WIDTH: Final = 24

_EPILOG: Final = """\
examples:
  holdfast inspect runs/demo                                 the newest verified step
  holdfast inspect runs/demo --step 200 --tree               the names as a tree, with sizes
  holdfast inspect runs/demo --layout --select 'model.*'     which rank wrote which part
  holdfast inspect runs/demo --json | jq .tensors
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "inspect",
        help="show the contents of a checkpoint",
        description="Shows the steps below a directory, and the tensors, plain values and layout "
        "of one of them. Reads no tensor. Checkpoints of other formats are shown as "
        "`holdfast convert` would read them.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add_path(parser)
    add_step(parser)
    parser.add_argument("--tree", action="store_true", help="show the names as a tree, with sizes")
    parser.add_argument("--layout", action="store_true", help="show which rank wrote which part")
    add_select(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the description of a step."""
    foreign = open_foreign(str(args.path), args.step)
    if foreign is not None:
        with foreign:
            return _run_foreign(foreign, args)
    root, named = pointed_at(args.path, args.step)
    step = choose(root, named)
    whole = quick_verify(open_store(root), step)
    manifest = _selected(whole, args.select, origin=str(args.path))
    marks = in_words(marks_of(whole.values))
    if args.json:
        print_json(_described(manifest, root, args) | ({"approximate": marks} if marks else {}))
        return 0
    shown = console()
    show_summary(manifest, steps(root), console=shown, marks=marks)
    if args.tree:
        shown.print()
        shown.print(names_tree.draw(_tree(manifest), title="tensors"))
    if args.layout:
        with closing(StoreSource(root, step)) as source:
            for pattern in layout_map.patterns(source.packs, list(manifest.tensors)):
                shown.print()
                shown.print(layout_map.picture(pattern), end="")
    if not args.tree and not args.layout:
        show_tensors(manifest, console=shown)
    return 0


def _run_foreign(step: ForeignStep, args: argparse.Namespace) -> int:
    """Print the description of a checkpoint of another format."""
    if args.layout:
        raise ConfigError(f"--layout: {step.kind} does not record it; only Holdfast's format does")
    manifest = _selected(step.manifest, args.select, origin=str(args.path))
    size = sum(tensor_bytes(manifest, fqn) for fqn in manifest.tensors)
    if args.json:
        found: Json = {
            "format": step.kind,
            "step": step.step,
            "bytes": size,
            "tensors": {
                fqn: {"dtype": tensor.dtype, "shape": tensor.shape}
                for fqn, tensor in manifest.tensors.items()
            },
            "aliases": manifest.aliases,
            "values": manifest.values,
        }
        print_json(found | ({"tree": _tree(manifest).described()} if args.tree else {}))
        return 0
    shown = console()
    summary = Table.grid(padding=(0, 2))
    rows = {
        "format": f"{step.kind} (without checksums)",
        "step": str(step.step),
        "size": f"{readable(size)} in {len(manifest.tensors)} tensors",
    }
    for name, text in rows.items():
        summary.add_row(Text(name, "bold"), Text(text))
    shown.print(summary)
    if args.tree:
        shown.print()
        shown.print(names_tree.draw(_tree(manifest), title="tensors"))
    else:
        show_tensors(manifest, console=shown)
    return 0


def _selected(manifest: Manifest, globs: list[str] | None, *, origin: str) -> Manifest:
    """Return the manifest with the chosen names only."""
    tensors = chosen(manifest.tensors, globs)
    aliases, values = chosen(manifest.aliases, globs), chosen(manifest.values, globs)
    require([*tensors, *aliases, *values], globs, origin=origin)
    return msgspec.structs.replace(
        manifest,
        tensors={name: manifest.tensors[name] for name in tensors},
        aliases={name: manifest.aliases[name] for name in aliases},
        values={name: manifest.values[name] for name in values},
    )


def _tree(manifest: Manifest) -> names_tree.Branch:
    return names_tree.grow(manifest.tensors, manifest.aliases)


def _described(manifest: Manifest, root: object, args: argparse.Namespace) -> Json:
    found = describe(manifest, steps(str(root)))
    if args.tree:
        found["tree"] = _tree(manifest).described()
    if args.layout:
        with closing(StoreSource(str(root), manifest.step)) as source:
            found["layout"] = layout_map.described(source.packs, list(manifest.tensors))
    return found


def describe(manifest: Manifest, there: list[StepInfo]) -> Json:
    """Return the description as JSON."""
    bases = manifest.bases().values()
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
        "bases": [msgspec.to_builtins(record) for record in bases],
        "tensors": {
            fqn: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "chunk": tensor.cell,
                "bytes": tensor_bytes(manifest, fqn),
                **({"codec": str(tensor.codec)} if tensor.codec else {}),
            }
            for fqn, tensor in manifest.tensors.items()
        },
        "aliases": manifest.aliases,
        "values": manifest.values,
    }


def show_summary(
    manifest: Manifest, there: list[StepInfo], *, console: Console, marks: str = ""
) -> None:
    """Print the properties of the checkpoint: step, run, mesh, size, and any ``marks``."""
    summary = Table.grid(padding=(0, 2))
    mesh = " x ".join(f"{axis}={n}" for axis, n in manifest.mesh.items()) or "none"
    rows = {
        "step": f"{manifest.step}  (there: {_steps(there)})",
        "run": f"{manifest.run or '(saved by ckpt.save)'}, generation {manifest.generation}",
        "mesh": f"{mesh}, saved by {manifest.world_size} rank(s)",
        "size": _size(manifest),
        "written by": ", ".join(f"{name} {v}" for name, v in manifest.created_by.items()),
    }
    if marks:
        rows["model"] = marks
    if bases := manifest.bases():
        homes = sorted({path.split("/")[1] for path in bases})
        rows["refers to"] = f"{len(bases)} packs of {', '.join(homes)}, which must be kept"
    codecs = sorted({str(tensor.codec) for tensor in manifest.tensors.values() if tensor.codec})
    if codecs:
        count = sum(tensor.codec is not None for tensor in manifest.tensors.values())
        rows["compressed"] = f"{count} tensors, by {', '.join(codecs)}"
    for name, text in rows.items():
        summary.add_row(Text(name, "bold"), Text(text))
    console.print(summary)


def show_tensors(manifest: Manifest, *, console: Console) -> None:
    """Print the tensors, then the plain values."""
    compressed = any(tensor.codec for tensor in manifest.tensors.values())
    tensors = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("tensor", "dtype", "shape", "chunk", *(("codec",) if compressed else ())):
        tensors.add_column(title, overflow="fold")
    tensors.add_column("size", justify="right", no_wrap=True)
    for fqn, tensor in manifest.tensors.items():
        row = [fqn, tensor.dtype, shape_text(tensor.shape), shape_text(tensor.cell)]
        row += [str(tensor.codec or "")] if compressed else []
        tensors.add_row(*row, readable(tensor_bytes(manifest, fqn)))
    for alias, fqn in manifest.aliases.items():
        tensors.add_row(alias, f"= {fqn}")
    console.print()
    console.print(tensors, markup=False)
    if not manifest.values:
        return
    values = Table(box=None, header_style="bold", pad_edge=False)
    shown = list(manifest.values.items())[:_SHOWN_VALUES]
    left = console.width - max(len(name) for name, _ in shown) - 2  # names are never cut
    values.add_column("value", overflow="fold", no_wrap=left >= _VALUE_WIDTH)
    values.add_column("", overflow="ellipsis", no_wrap=True, max_width=max(left, _VALUE_WIDTH))
    for name, value in shown:
        values.add_row(name, json_text(value))
    if more := len(manifest.values) - len(shown):
        values.add_row(f"… and {more} more (--json shows all)", "")
    console.print()
    console.print(values, markup=False)


def _size(manifest: Manifest) -> str:
    size = sum(tensor_bytes(manifest, fqn) for fqn in manifest.tensors)
    stored = sum(record.nbytes for record in manifest.files())
    noun = "tensor" if len(manifest.tensors) == 1 else "tensors"
    return (
        f"{readable(size)} in {len(manifest.tensors)} {noun}; "
        f"the step has {readable(stored)} in {len(list(manifest.files())) + 1} files"
    )


def _steps(there: list[StepInfo]) -> str:
    names = [str(info.step) + ("" if info.committed else " unfinished") for info in there]
    return ("… " if len(names) > 10 else "") + ", ".join(names[-10:])
