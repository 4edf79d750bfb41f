"""`holdfast prune`: remove old checkpoints, but never the newest verified one."""

from __future__ import annotations

import argparse
import socket
import time
from contextlib import suppress
from typing import Final

from rich.table import Table
from rich.text import Text

from holdfast.ckpt.checkpoints import pins
from holdfast.ckpt.checkpoints.catalog import choose, committed, load_manifest, step_folder
from holdfast.ckpt.checkpoints.retention import remove_steps
from holdfast.ckpt.checkpoints.retention_rules import (
    Best,
    PruneCandidate,
    RetentionVerdict,
    Rules,
    judge,
    parse_limit,
    ranked,
)
from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.format.manifest import Manifest
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.places import locate, open_store
from holdfast.elastic.errors import ConfigError
from holdfast.tools.subcommand import HelpFormatter, Subparsers, positive
from holdfast.tools.terminal import (
    console,
    place,
    print_json,
    readable,
    step_number,
)

_EPILOG: Final = """\
examples:
  holdfast prune runs/demo                                  keep the newest 3
  holdfast prune runs/demo --keep-last 5 --keep-every 1000 --dry-run
  holdfast prune runs/demo --keep-best eval.loss:min:2      a plain value of the state
  holdfast prune runs/demo --ttl 7d --pin 4000              pins last until --unpin

A step stays if any rule keeps it. --ttl also removes steps that other rules keep, but never a
pinned step, and never the newest step whose bytes verify. An age in days, hours or minutes counts
from the moment when prune on this host first saw the step; it uses no other host's clock. An age in
steps, as in 5000steps, needs no clock. Packs to which a remaining step refers stay too.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "prune",
        help="remove old checkpoints, but never the newest verified one",
        description="Removes checkpoints below ROOT that no rule keeps, and says why. The newest "
        "checkpoint whose bytes verify always stays; if none verifies, all stay.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("root", type=place, metavar="ROOT", help="the root of checkpoints")
    parser.add_argument(
        "--keep-last", type=positive, default=3, metavar="N", help="keep the newest N (3)"
    )
    parser.add_argument(
        "--keep-every", type=positive, metavar="K", help="keep every step that is a multiple of K"
    )
    parser.add_argument(
        "--keep-best",
        type=_best,
        action="append",
        default=[],
        metavar="METRIC:min|max[:N]",
        help="keep the N (default: 1) best steps by a plain value; repeatable",
    )
    parser.add_argument(
        "--ttl", type=_limit, metavar="AGE", help="remove older steps, as in 7d, 12h or 5000steps"
    )
    parser.add_argument(
        "--pin", type=step_number, nargs="+", default=[], metavar="STEP", help="never go"
    )
    parser.add_argument(
        "--unpin", type=step_number, nargs="+", default=[], metavar="STEP", help="may go"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be removed, and remove nothing"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _best(text: str) -> Best:
    try:
        return Best.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _limit(text: str) -> tuple[float | None, int | None]:
    try:
        return parse_limit(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(args: argparse.Namespace) -> int:
    """Remove old checkpoints and list them."""
    most_age_s, most_steps_old = args.ttl or (None, None)
    rules = Rules(
        keep_last=args.keep_last,
        keep_every=args.keep_every,
        keep_best=tuple(args.keep_best),
        most_age_s=most_age_s,
        most_steps_old=most_steps_old,
    )
    root, named = locate(args.root)
    if named is not None:
        raise ConfigError(f"{args.root} is one step; give the root {root}")
    newest_verified = choose(args.root, None)
    store = open_store(args.root)
    there = committed(store)
    manifests = {step: _manifest(store, step) for step in there}
    _check_named(args, manifests)
    verdicts = judge(_candidates(store, manifests, args), rules, newest_verified=newest_verified)
    going = [verdict.step for verdict in verdicts if not verdict.keep]
    freed = _freed(manifests, going)
    if not args.dry_run:
        remove_steps(store, going)
    if args.json:
        print_json({"dry_run": args.dry_run, "removed": going, "bytes": freed, "steps": verdicts})
    else:
        _show(verdicts, manifests, freed=freed, dry_run=args.dry_run)
    return 0


def _check_named(args: argparse.Namespace, manifests: dict[int, Manifest | None]) -> None:
    """Refuse unknown pins and metrics.

    A typing error would otherwise remove the steps that the user wants to keep.
    """
    if gone := [step for step in args.pin if step not in manifests]:
        raise NotFoundError(
            f"{args.root}: no checkpoint of step {gone[0]} to pin; steps there: "
            f"{', '.join(map(str, manifests))}. Nothing was removed"
        )
    candidates = [
        PruneCandidate(step=step, values=manifest.values)
        for step, manifest in manifests.items()
        if manifest
    ]
    for best in args.keep_best:
        if not ranked(candidates, best):
            raise NotFoundError(
                f"{args.root}: --keep-best {best.metric}: no step has a number of that name; "
                f"`holdfast cat {args.root} NAME` shows values. Nothing was removed"
            )


def _manifest(store: Store, step: int) -> Manifest | None:
    """Return a step's manifest, None if it is damaged or missing."""
    with suppress(CorruptError, NotFoundError):
        return load_manifest(store, step_folder(step))
    return None


def _candidates(
    store: Store, manifests: dict[int, Manifest | None], args: argparse.Namespace
) -> list[PruneCandidate]:
    """Return the steps with pins and ages.

    Stores the pins that ``args`` set, and the time at which this host first saw a step.
    """
    host, now_s = socket.gethostname(), time.time()
    known = pins.load(store)
    if args.ttl or args.pin or args.unpin:
        change = {"pin": args.pin, "unpin": args.unpin, "host": host, "now_s": now_s}
        if args.dry_run:
            known = known.after(there=manifests.keys(), **change)
        else:
            known = pins.update(store, there=manifests.keys(), **change)
    ages = known.ages(host=host, now_s=now_s)
    return [
        PruneCandidate(
            step=step,
            values=manifest.values if manifest else {},
            pinned=step in known.pins,
            age_s=ages.get(step),
        )
        for step, manifest in manifests.items()
    ]


def _bytes(manifest: Manifest | None) -> int:
    return sum(record.nbytes for record in manifest.files()) if manifest else 0


def _freed(manifests: dict[int, Manifest | None], going: list[int]) -> int:
    """Return the bytes that a removal frees: without packs that a remaining step refers to."""
    kept: set[str] = set()
    for step, manifest in manifests.items():
        if manifest and step not in going:
            kept.update(path.removeprefix("../") for path in manifest.bases())
    return sum(
        record.nbytes
        for step in going
        if (manifest := manifests[step])
        for record in manifest.files()
        if f"{step_folder(step)}/{record.path}" not in kept
    )


def _show(
    verdicts: tuple[RetentionVerdict, ...],
    manifests: dict[int, Manifest | None],
    *,
    freed: int,
    dry_run: bool,
) -> None:
    table = Table.grid(padding=(0, 2))
    table.columns[:] = []
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    verb = "would go" if dry_run else "removed"
    for verdict in verdicts:
        manifest = manifests[verdict.step]
        size = readable(_bytes(manifest)) if manifest else "damaged"
        fate = Text("stays", "green") if verdict.keep else Text(verb, "red")
        table.add_row(f"step {verdict.step}", fate, size, "; ".join(verdict.reasons))
    console().print(table, markup=False)
    going = [verdict.step for verdict in verdicts if not verdict.keep]
    listed = f": {', '.join(map(str, going))} ({readable(freed)})" if going else ""
    did = "would remove" if dry_run else "removed"
    print(f"{did} {len(going)} checkpoints{listed}; {len(verdicts) - len(going)} stay")
