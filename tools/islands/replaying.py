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
from holdfast.tools.islands.replay_pairs import replay_pairs
from holdfast.tools.islands.replayed_pairs import ends_as_replayed, known_islands
from holdfast.tools.islands.replayed_sea import ReplayedSea
from holdfast.tools.islands.tables import replay_view
from holdfast.tools.terminal import SafeConsole, console, print_json

EXIT_WRONG: Final = 1


def run(args: argparse.Namespace) -> int:
    """Replay, print the outcomes, and return 1 if something is wrong."""
    store = open_store(args.sea)
    records, box = records_of(store), Mailbox(store)
    view, founded = View.of(records), records[0]
    assert isinstance(founded, Founded)

    def payload(part: Part) -> bytes:
        return box.payload(part.island, part.digest)

    merges = sum(isinstance(record, Merged) for record in records)
    with _bar() as bar:
        task = bar.add_task("repeating merges", total=merges)

        def progress(count: int) -> None:
            bar.advance(task, count)

        sea = ReplayedSea(founded)
        if view.is_paired:
            known = known_islands(founded, records, args.source, step=args.step)
            found = replay_pairs(records, known, payload, progress=progress)
            ends_equal = ends_as_replayed(view, sea, payload, store.where(WEIGHTS))
        else:
            bases = None if args.source is None else sea.load(args.source, step=args.step)
            found = replay(records, bases, sea, payload, progress=progress)
            is_known = bases is not None
            ends_equal = _compare_end(found, sea, store.where(WEIGHTS), is_known=is_known)
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
