"""`holdfast top`: a run in the terminal as it goes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib.util import find_spec
from typing import Final

from holdfast.tools.live.follow import Follower
from holdfast.tools.live.options import add_options, follower
from holdfast.tools.printing import say
from holdfast.tools.subcommand import HelpFormatter, Subparsers, positive_number
from holdfast.tools.top.plain import OVER, RunLines, whole

_EVERY_S: Final = 1.0
_ASKS_S: Final = 5.0
"""Asking a node costs it and this machine some milliseconds of a processor."""

_LINES_S: Final = 10.0

_EPILOG: Final = """\
examples:
  holdfast run --run-dir runs/live --nodes 3 train.py &
  holdfast top runs/live              nodes, protection, recoveries, messages, as they change
  holdfast top runs/live --lines      the same as lines, for a file or a narrow line
  holdfast top runs/live --once       the state now, in a few lines
  holdfast top machine0/run machine1/run          a job on two machines, from a copy of each
  holdfast top --coordinator head:29400           its members and protection, without its past

keys: n, r, m go to nodes, recoveries and messages; Enter shows the whole of a row with the
planner's reason, Escape closes it; p holds the picture; q ends the command, never the job.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "top",
        help="show a run in the terminal as it goes: nodes, protection, recoveries, messages",
        description="Follows the events of a run and asks its sidecars. The command does not "
        "disturb the training. Where stdout is no terminal, or the extra top is not installed, it "
        "prints lines.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add_options(add)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--lines", action="store_true", help="print lines, until the job ends")
    form.add_argument("--once", action="store_true", help="print the state now, and end")
    add(
        "--every",
        type=positive_number,
        metavar="SECONDS",
        help="show a newer state so often (default: 1; with --lines: 10)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Show the run until the user or, with lines, the job ends it."""
    followed = follower(args)
    if args.once:
        _catch_up(followed)
        followed.ask()
        for line in whole(followed.view()):
            say(line)
        followed.close()
        return 0
    if args.lines or not _fits_terminal():
        return _print_lines(followed, every_s=args.every or _LINES_S)
    from holdfast.tools.top.app import TopApp

    app = TopApp(followed, every_s=args.every or _EVERY_S, asks_s=_ASKS_S)
    app.run()
    return app.return_code or 0


def _fits_terminal() -> bool:
    """Return whether the application can be shown; say what lacks where only that does."""
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        return False
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    if find_spec("textual") is None:
        say("plain lines, as textual is not installed: pip install 'holdfast[top]'", stderr=True)
        return False
    return True


def _print_lines(followed: Follower, *, every_s: float) -> int:
    lines = RunLines(every_s=every_s)
    asks_s = 0.0
    while True:
        _catch_up(followed)
        if time.monotonic() >= asks_s:
            followed.ask()
            asks_s = time.monotonic() + _ASKS_S
        view = followed.view()
        for line in lines.lines(view):
            print(line, flush=True)
        if view.state in OVER:
            return 0 if view.state == "done" else 1
        time.sleep(min(every_s, _EVERY_S))


def _catch_up(followed: Follower) -> None:
    while followed.read():
        pass
