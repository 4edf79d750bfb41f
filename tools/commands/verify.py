"""`holdfast verify`: check checkpoints against their checksums."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

from holdfast.ckpt.checkpoints.catalog import choose, committed_steps
from holdfast.ckpt.checkpoints.verify import Damage, Examination, deep_faults, examine
from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.places import open_store
from holdfast.elastic.errors import ConfigError
from holdfast.tools.commands.checkpoints import add_path, add_step, add_threads, pointed_at
from holdfast.tools.long_work import LongWork
from holdfast.tools.printing import say
from holdfast.tools.subcommand import HelpFormatter, Subparsers
from holdfast.tools.terminal import print_json, readable

EXIT_DAMAGED: Final = 1

_EPILOG: Final = """\
examples:
  holdfast verify runs/demo                    the newest step: manifest, indexes, sizes
  holdfast verify runs/demo --deep             and every byte of it
  holdfast verify runs/demo --all --deep --json

Packs of other steps to which a step refers are checked with it. Each damage is reported with file,
tensor, chunk (offset + shape) and offset in bytes. Exit codes: 0 sound, 1 damaged, 2 wrong command
line.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "verify",
        help="check every byte of a checkpoint against its checksums",
        description="Checks manifest, indexes and file sizes, with --deep every byte of the "
        "tensors too. Exit code 1 when something is damaged.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add_path(parser)
    add_step(parser, default="the newest")
    parser.add_argument("--all", action="store_true", help="check every step of the root")
    parser.add_argument("--deep", action="store_true", help="read and check every byte")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_threads(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Check, print the damage, and return 1 if there is any."""
    root, step = pointed_at(args.path, args.step)
    if args.all and step is not None:
        raise ConfigError(
            f"--all checks every step, but only step {step} was named; give the root {root} "
            "without a step"
        )
    there = committed_steps(root)
    if step is not None or not there:
        there = [choose(root, step)]
    elif not args.all:
        there = there[-1:]
    store = open_store(root)
    found = {each: _examined(store, each) for each in there}
    unread = _without_repeats(found) if args.deep else 0
    with LongWork("Nothing was changed; the same command checks anew.") as bar:
        task = bar.add_task("checking", total=unread)
        for each in found.values() if args.deep else ():
            _deepen(store, each, threads=args.threads, progress=lambda n: bar.advance(task, n))
    damaged = any(each.faults for each in found.values())
    if args.json:
        print_json(_described(found, deep=args.deep, nbytes=unread))
    else:
        _show(found, deep=args.deep, nbytes=unread)
    return EXIT_DAMAGED if damaged else 0


def _examined(store: Store, step: int) -> Examination:
    try:
        return examine(store, step)
    except NotFoundError as error:  # removed since it was listed
        return Examination(faults=[Damage(file=store.where(""), message=str(error))])


def _without_repeats(found: dict[int, Examination]) -> int:
    """Keep each chunk only with the first step that needs it; return the bytes to be read."""
    seen: set[tuple[str, int, str, int]] = set()
    for each in found.values():
        kept = []
        for stored in each.chunks:
            key = (stored.pack, stored.chunk.at, stored.fqn, stored.chunk.crc32c)
            if key not in seen:
                seen.add(key)
                kept.append(stored)
        each.chunks = kept
    return sum(each.nbytes for each in found.values())


def _deepen(
    store: Store, found: Examination, *, threads: int, progress: Callable[[int], None]
) -> None:
    found.faults += deep_faults(store, found, threads=threads, progress=progress)


def _show(found: dict[int, Examination], *, deep: bool, nbytes: int) -> None:
    depth = "every byte checked" if deep else "sizes and indexes checked"
    for step, each in found.items():
        if not each.faults:
            say(f"step {step}: sound ({depth})")
        for fault in each.faults:
            say(f"step {step}: damaged: {fault.message}")
    if deep and len(found) > 1:
        bad = sum(bool(each.faults) for each in found.values())
        say(f"{len(found)} steps, {readable(nbytes)} read, {bad} damaged")


def _described(found: dict[int, Examination], *, deep: bool, nbytes: int) -> object:
    return {
        "ok": not any(each.faults for each in found.values()),
        "deep": deep,
        "bytes_read": nbytes,
        "steps": {
            str(step): {"ok": not each.faults, "faults": each.faults}
            for step, each in found.items()
        },
    }
