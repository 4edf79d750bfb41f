"""`holdfast traces`: send a run's recoveries, checkpoints and joins to an OTLP collector."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.ckpt.errors import PeerError
from holdfast.tools.beside.collector import collector_url
from holdfast.tools.beside.reading import OrderedEvents
from holdfast.tools.subcommand import HelpFormatter, Subparsers
from holdfast.tools.traces.fold import Traces

if TYPE_CHECKING:
    from holdfast.tools.traces.outbox import SpanOutbox

_EVERY_S: Final = 0.5
_LAST_S: Final = 6.0
_NICE: Final = 10

_EPILOG: Final = """\
examples:
  holdfast run --run-dir runs/live --otlp http://localhost:4318 train.py    with the job
  holdfast traces runs/live --otlp http://localhost:4318                    of a job that runs
  holdfast traces runs/old --otlp http://localhost:4318 --once              of one that is over

OTEL_EXPORTER_OTLP_HEADERS has the headers of the requests, such as a token. A span has the same
number whoever sends it and how often, so that a collector knows one that was sent before.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "traces",
        help="send a run's recoveries, checkpoints and joins as traces to an OTLP collector",
        description="Reads the events of a run and sends each change of the ranks, each "
        "checkpoint and each join as one trace by OTLP over HTTP, until the job ends. The command "
        "does not disturb the training, which does not need it.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="the directory that `holdfast run --run-dir` got",
    )
    add("--otlp", required=True, metavar="URL", help="the collector, as in http://localhost:4318")
    add("--once", action="store_true", help="send the history of the run, and do not wait for more")
    add("--beside", action="store_true", help=argparse.SUPPRESS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Send the spans of the run; return 1 if some could not be sent."""
    url = collector_url(args.otlp)
    events = OrderedEvents(args.run_dir)
    from holdfast.tools.traces.outbox import SpanOutbox, exporter_to  # these need the extra otel

    outbox, traces = SpanOutbox(exporter_to(url)), Traces()
    with contextlib.suppress(OSError):
        os.nice(_NICE)  # training comes first
    try:
        for batch in events.history():
            outbox.add(traces.add(batch))
            if args.once:
                _must_send(outbox, url)
            outbox.send()
        if not args.once:
            _follow(events, traces, outbox, url=url)
    finally:
        outbox.add(traces.close())
        outbox.close(within_s=_LAST_S)
    if not args.beside or outbox.dropped:
        lost = f"; {outbox.dropped} could not be sent" if outbox.dropped else ""
        _say(f"{outbox.sent} spans sent to {url}{lost}")
    return 1 if outbox.dropped else 0


def _must_send(outbox: SpanOutbox, url: str) -> None:
    if not outbox.send():
        raise PeerError(f"{url} takes no spans; check the address, and that the collector runs")


def _follow(events: OrderedEvents, traces: Traces, outbox: SpanOutbox, *, url: str) -> None:
    """Send what appears until the job ends."""
    told = False
    while not events.over:
        time.sleep(_EVERY_S)
        outbox.add(traces.add(events.new()))
        outbox.send()
        if outbox.failing and not told:
            _say(f"{url} takes no spans; trying again, {len(outbox)} wait")
        elif told and not outbox.failing:
            _say(f"{url} takes spans again")
        told = outbox.failing


def _say(line: str) -> None:
    print(f"holdfast: traces: {line}", file=sys.stderr, flush=True)
