"""`holdfast islands replay`: make the merges of a logbook once more, and compare the digests."""

from __future__ import annotations

import argparse
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.ckpt.store.places import open_store
from holdfast.elastic.islands.island import WEIGHTS
from holdfast.elastic.islands.mailbox import Mailbox
from holdfast.elastic.sea.records import Founded, Merged, Part
from holdfast.elastic.sea.view import View
from holdfast.tools.islands.glance import records_of
from holdfast.tools.islands.replay import Replayed, replay
from holdfast.tools.islands.replayed_sea import ReplayedSea
from holdfast.tools.islands.tables import replay_view
from holdfast.tools.subcommand import HelpFormatter, Subparsers
from holdfast.tools.terminal import SafeConsole, console, place, print_json, step_number

EXIT_WRONG: Final = 1

_EXAMPLES: Final = """\
examples:
  holdfast islands replay --sea s3://bucket/sea --from runs/oslo            the newest checkpoint
  holdfast islands replay --sea s3://bucket/sea --from runs/oslo --step 400
  holdfast islands replay --sea s3://bucket/sea                             payloads alone

A replay begins with the weights that --from names: a checkpoint that an island wrote while it
trained, or one of the model with the first weights of the sea. From there it makes each merge anew
from the payloads, by the code of the islands, and compares the result with the digest that islands
state later. Islands remove payloads that nobody needs any more, so an old merge cannot be repeated;
the command says which. Without --from it checks the records and the payloads that are there.
Exit codes: 0 nothing is wrong, 1 a result differs or a payload is damaged, 2 wrong command line.
"""


def declare(inner: Subparsers) -> None:
    """Declare the command and its arguments."""
    parser = inner.add_parser(
        "replay",
        help="repeat the merges of a sea, and compare the digests of the results",
        description="Repeats the merges of a logbook from their payloads, and compares the digest "
        "of each result with the one that the islands state.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--sea", type=place, required=True, metavar="URL", help="the place that islands meet at")
    add(
        "--from",
        dest="source",
        type=place,
        metavar="CHECKPOINT",
        help="the checkpoint to begin with: of an island, or of the model with the first weights",
    )
    add("--step", type=step_number, metavar="STEP", help="its step (default: the newest)")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Replay, print the outcomes, and return 1 if something is wrong."""
    store = open_store(args.sea)
    records, box = records_of(store), Mailbox(store)
    View.of(records)
    founded = records[0]
    assert isinstance(founded, Founded)
    sea = ReplayedSea(founded)
    bases = None if args.source is None else sea.load(args.source, step=args.step)

    def payload(part: Part) -> bytes:
        return box.payload(part.island, part.digest)

    merges = sum(isinstance(record, Merged) for record in records)
    with _bar() as bar:
        task = bar.add_task("repeating merges", total=merges)
        found = replay(records, bases, sea, payload, progress=lambda n: bar.advance(task, n))
    ends_equal = _compare_end(found, sea, store.where(WEIGHTS), is_known=bases is not None)
    if args.json:
        print_json({"sea": args.sea, "merges": found, "weights_equal": ends_equal})
    else:
        console().print(replay_view(args.sea, found, ends_equal=ends_equal))
    wrong = any(each.outcome in ("differs", "damaged") for each in found)
    return EXIT_WRONG if wrong or ends_equal is False else 0


def _compare_end(
    found: list[Replayed], sea: ReplayedSea, root: str, *, is_known: bool
) -> bool | None:
    """Compare the end with the weights that the last island left; None if one is not there."""
    last = {each.portion: each.outcome for each in found}
    if not is_known or not last or not set(last.values()) <= {"repeated", "verified", "earlier"}:
        return None
    equal = sea.equals(root)
    if equal:
        for each in found:
            if each.outcome == "repeated":
                each.outcome = "verified"
    return equal


def _bar() -> Progress:
    shown = SafeConsole(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=shown,
        transient=True,
        disable=not shown.is_terminal,
    )
