"""`holdfast prune`: remove old checkpoints, never the newest verified one."""

from __future__ import annotations

import argparse

from ckpt.catalog import committed_steps
from ckpt.retention import prune
from tools.cli import Subparsers


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "prune",
        help="remove old checkpoints, never the newest verified one",
        description="Remove all but the newest checkpoints below ROOT. The newest one whose bytes "
        "can be trusted stays in any case; when none can be trusted, all stay.",
    )
    parser.add_argument("root", metavar="ROOT", help="directory that holds step-… directories")
    parser.add_argument(
        "--keep-last", type=_positive, default=3, metavar="N", help="checkpoints to keep (3)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Prune and say what went."""
    gone = prune(args.root, keep_last=args.keep_last, dry_run=args.dry_run)
    verb = "would remove" if args.dry_run else "removed"
    listed = f": {', '.join(map(str, gone))}" if gone else ""
    stay = len(committed_steps(args.root)) - (len(gone) if args.dry_run else 0)
    print(f"{verb} {len(gone)} checkpoints{listed}; {stay} stay")
    return 0
