"""`holdfast islands`: look at a sea, repeat its merges, check its samples, make its key."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast

import msgspec
from rich.live import Live

from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.channel.shared_key import expanded
from holdfast.elastic.errors import ConfigError
from holdfast.tools.islands.glance import PATIENCE_S, listen, look, records_of
from holdfast.tools.islands.samples import samples_of
from holdfast.tools.islands.status import SeaStatus, status
from holdfast.tools.islands.tables import samples_view, sea_view
from holdfast.tools.subcommand import HelpFormatter, Subparsers, positive_number
from holdfast.tools.terminal import console, place, print_json, step_number

_STATUS: Final = """\
examples:
  holdfast islands status --sea s3://bucket/sea
  holdfast islands status --sea s3://bucket/sea --listen 60     also the seconds of a tide
  holdfast islands status --sea runs/sea --json | jq '.waits_for'

The files of a store have no ages that all clocks agree on. So the command reads them twice, and an
island whose sign of life has changed between is alive. It writes nothing.
"""

_KEY: Final = """\
example:
  holdfast islands key sea.key          once; then copy it to the machines of all islands
  holdfast run --island oslo --sea s3://bucket/sea --sea-key sea.key train.py

A holder of the key can ask islands for payloads, and give them some, which are compared with the
digests of works. No snapshot can be read with it, and no process of a run commanded.
"""

_REPLAY: Final = """\
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


_SAMPLES: Final = """\
examples:
  holdfast islands samples --sea s3://bucket/sea

A sample is merged when all portions have merged works that hold it. Those of an island that left
before that are dealt anew. `holdfast chaos check DIR --of-sea URL --island NAME` compares the
samples that an island trained with those of its merged works.
Exit codes: 0 nothing is wrong, 1 a sample is merged twice or not at all, 2 wrong command line.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "islands",
        help="look at runs that merge their weights, and repeat their merges",
        description="Islands are runs that merge their weights with each other through a store; "
        "together they are a sea. These commands read the files that they keep there.",
    )
    inner = cast(
        "Subparsers", parser.add_subparsers(dest="islands", metavar="COMMAND", required=True)
    )
    _declare_status(inner)
    _declare_replay(inner)
    _declare_samples(inner)
    _declare_key(inner)
    return parser


def _of_a_sea(
    inner: Subparsers, name: str, *, help_: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """Declare a command that reads the files of a sea."""
    parser = inner.add_parser(
        name,
        help=help_,
        description=description,
        epilog=epilog,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--sea", type=place, required=True, metavar="URL", help="the place that islands meet at"
    )
    return parser


def _declare_status(inner: Subparsers) -> None:
    parser = _of_a_sea(
        inner,
        "status",
        help_="show the islands of a sea, its merges, and whom they wait for",
        description="Shows the islands of a sea with their weights, signs of life and works for "
        "the next merge, the islands that this merge waits for, and the bytes that it needs of an "
        "island's line.",
        epilog=_STATUS,
    )
    parser.add_argument(
        "--listen",
        type=positive_number,
        metavar="S",
        help="seconds between the two looks (default: until all islands gave a sign of life, at "
        f"most {PATIENCE_S:g})",
    )
    parser.add_argument(
        "--watch", action="store_true", help="look again and again, until all islands have left"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one line each time")


def _declare_replay(inner: Subparsers) -> None:
    parser = _of_a_sea(
        inner,
        "replay",
        help_="repeat the merges of a sea, and compare the digests of the results",
        description="Repeats the merges of a logbook from their payloads, and compares the digest "
        "of each result with the one that the islands state.",
        epilog=_REPLAY,
    )
    add = parser.add_argument
    add(
        "--from",
        dest="source",
        type=place,
        metavar="CHECKPOINT",
        help="the checkpoint to begin with: of an island, or of the model with the first weights",
    )
    add("--step", type=step_number, metavar="STEP", help="its step (default: the newest)")
    add("--json", action="store_true", help="print JSON")


def _declare_samples(inner: Subparsers) -> None:
    parser = _of_a_sea(
        inner,
        "samples",
        help_="check that every sample that a logbook deals is merged once",
        description="Checks the samples that a logbook deals (data='dealt'): each of an epoch is "
        "merged once, by one island.",
        epilog=_SAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _declare_key(inner: Subparsers) -> None:
    parser = inner.add_parser(
        "key",
        help="make the key with which islands give each other their payloads",
        description="Makes the sea's key file, with which islands give each other their payloads "
        "without the store. It is worth nothing inside a run.",
        epilog=_KEY,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("file", type=place, metavar="FILE", help="the new file; 0600")


def run(args: argparse.Namespace) -> int:
    """Run the inner command."""
    if args.islands == "samples":
        return _check_samples(args)
    if args.islands == "key":
        return _make_key(expanded(args.file))
    if args.islands == "replay":
        from holdfast.tools.islands import replaying  # with torch, which the status does not need

        return replaying.run(args)
    shown, found = console(), _looks(args)
    if args.json or not (args.watch and shown.is_terminal):
        for each in found:
            if args.json:
                print_json(each)
            else:
                shown.print(sea_view(each))
            sys.stdout.flush()
        return 0
    with Live(sea_view(next(found)), console=shown, auto_refresh=False) as live:
        for each in found:
            live.update(sea_view(each), refresh=True)
    return 0


def _check_samples(args: argparse.Namespace) -> int:
    """Check the samples; 1 if one is merged twice, or missing at the end."""
    found = samples_of(records_of(open_store(args.sea)), {})
    if args.json:
        print_json({"sea": args.sea, **msgspec.structs.asdict(found)})
    else:
        console().print(samples_view(args.sea, found))
    return 1 if found.wrong else 0


def _make_key(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        RunKey.new().save(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that is not there yet") from error
    console().print(f"{path} is the key of a sea: copy it to the machines of all its islands")
    return 0


def _looks(args: argparse.Namespace) -> Iterator[SeaStatus]:
    """Yield the status, with ``--watch`` again and again while there are islands."""
    store = open_store(args.sea)
    before = look(store)
    while True:
        after = listen(store, before, for_s=args.listen)
        yield status(args.sea, before, after)
        if not args.watch or not after.view.members:
            return
        before = after
