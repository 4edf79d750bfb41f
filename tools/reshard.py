"""`holdfast reshard`: rewrite a checkpoint for another layout or format."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.catalog import choose, locate
from ckpt.manifest import stored_bytes
from ckpt.rewrite import export_safetensors, reshard
from ckpt.source import StoreSource
from tools.verify import progress_bar

if TYPE_CHECKING:
    from tools.cli import Subparsers

MAX_RANKS = 65_536


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "reshard",
        help="rewrite a checkpoint for another layout or format",
        description="Writes a checkpoint again, as another number of ranks would have saved it or "
        "as safetensors. Loading needs no resharding: any layout loads any checkpoint. Every byte "
        "is checked on the way, and the source is not changed.",
    )
    parser.add_argument("source", metavar="SRC", help="the root of checkpoints, or one step of it")
    parser.add_argument("target", metavar="DST", help="the directory to write to")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--mesh", type=mesh, metavar="dp=N", help="the new layout, as in dp=2")
    how.add_argument("--to", choices=["safetensors"], help="the new format (module tensors only)")
    parser.add_argument("--step", type=int, help="the step to read (default: the newest verified)")
    parser.add_argument("--name", help="with --to: the module, where the state has several")
    return parser


def mesh(text: str) -> dict[str, int]:
    """Parse ``dp=N``."""
    match = re.fullmatch(r"dp=(\d{1,5})", text)
    if match is None or not 1 <= int(match[1]) <= MAX_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mesh this version writes; give dp=N with N from 1 to {MAX_RANKS}"
        )
    return {"dp": int(match[1])}


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint again and say where."""
    root, named = locate(args.source)
    step = choose(root, named if args.step is None else args.step)
    with StoreSource(root, step) as source, progress_bar() as bar:
        task = bar.add_task("writing", total=None if args.to else _total(source))
        if args.to:
            files = export_safetensors(
                source, args.target, name=args.name, progress=lambda n: bar.advance(task, n)
            )
            done = ", ".join(str(file) for file in files)
        else:
            reshard(
                source, args.target, dp=args.mesh["dp"], progress=lambda n: bar.advance(task, n)
            )
            done = str(Path(args.target, source.folder))
    print(f"step {step} written: {done}")
    return 0


def _total(source: StoreSource) -> int:
    return sum(
        stored_bytes(chunk, tensor)
        for index in source.packs.values()
        for tensor in index.tensors.values()
        for chunk in tensor.chunks
    )
