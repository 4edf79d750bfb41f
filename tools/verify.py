"""`holdfast verify`: check a checkpoint against its checksums."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ckpt.catalog import choose, committed_steps, locate, open_store
from ckpt.errors import NotFoundError
from ckpt.verify import Fault, deep_bytes, faults

if TYPE_CHECKING:
    from tools.cli import Subparsers

EXIT_DAMAGED = 1


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "verify",
        help="check every byte of a checkpoint against its checksums",
        description="Checks manifest, indexes and file sizes, with --deep every byte of the "
        "tensors too. Exit code 1 when something is damaged.",
    )
    parser.add_argument("path", metavar="PATH", help="the root of checkpoints, or one step of it")
    parser.add_argument("--step", type=int, help="the step to check (default: the newest)")
    parser.add_argument("--all", action="store_true", help="check every step")
    parser.add_argument("--deep", action="store_true", help="read and check every byte")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Check, print what is damaged, and return 1 if anything is."""
    root, named = locate(args.path)
    step = named if args.step is None else args.step
    there = committed_steps(root)
    if step is not None or not there:
        there = [choose(root, step)]
    elif not args.all:
        there = there[-1:]
    store = open_store(root)
    found: dict[int, list[Fault]] = {}
    with progress_bar() as bar:
        total = sum(deep_bytes(store, each) for each in there) if args.deep else None
        task = bar.add_task("checking", total=total)
        for each in there:
            try:
                found[each] = list(
                    faults(store, each, deep=args.deep, progress=lambda n: bar.advance(task, n))
                )
            except NotFoundError as error:  # removed meanwhile
                found[each] = [Fault(file=str(root), message=str(error))]
    damaged = any(found.values())
    if args.json:
        sys.stdout.write(msgspec.json.encode(_described(found, deep=args.deep)).decode() + "\n")
        return EXIT_DAMAGED if damaged else 0
    for each, damages in found.items():
        if not damages:
            depth = "every byte checked" if args.deep else "sizes and indexes checked"
            print(f"step {each}: sound ({depth})")
        for fault in damages:
            print(f"step {each}: damaged: {fault.message}")
    return EXIT_DAMAGED if damaged else 0


def progress_bar() -> Progress:
    """Return a progress bar that shows on a terminal only."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _described(found: dict[int, list[Fault]], *, deep: bool) -> object:
    return {
        "ok": not any(found.values()),
        "deep": deep,
        "steps": {str(step): {"ok": not bad, "faults": bad} for step, bad in found.items()},
    }
