"""`holdfast logs`: print a run's history in time order, and follow it."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from holdfast.ckpt.errors import CkptError, NotFoundError, PeerError
from holdfast.elastic.events import KINDS
from holdfast.elastic.events.log import EVENTS_PATTERN
from holdfast.elastic.launch.run_folder import KEY
from holdfast.tools.live.asking import ask
from holdfast.tools.logs.entries import DAMAGED, OUTPUT, HistoryLine, Wanted, as_json, as_text
from holdfast.tools.logs.history import RunHistory
from holdfast.tools.logs.since import parse_since
from holdfast.tools.printing import printable, say
from holdfast.tools.show.levels import LEVELS, Importance
from holdfast.tools.subcommand import HelpFormatter, Subparsers

_POLL_S: Final = 0.2
_QUIET_S: Final = 10.0
"""Seconds without news after which a follower asks the nodes whether there is a job."""

_EPILOG: Final = """\
examples:
  holdfast logs runs/live                            what happened, in time order
  holdfast logs runs/live --follow                   the same, until the job ends
  holdfast logs runs/live --node node1 --since 10m   of one node, since ten minutes ago
  holdfast logs runs/live --level warning            losses, stragglers, failures
  holdfast logs runs/live --kind proposed            why the planner did what it did
  holdfast logs runs/live --json | jq .fields        for machines
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "logs",
        help="print the history of a run in time order, and follow it",
        description="Prints the events of all nodes of a run in time order, one line each, with "
        "the output that the run directory keeps of workers (`holdfast run --capture-output`) and "
        "sidecars. It reads files only, of a running job or of one that is over.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="the directory that `holdfast run --run-dir` got",
    )
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="go on until the job ends; Ctrl-C says how to go on later",
    )
    parser.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="NAME",
        help="only what this node tells, and what others tell of it; repeatable",
    )
    parser.add_argument(
        "--since",
        type=_since,
        default=0.0,
        metavar="TIME",
        help="only what is not older: 90s, 10m, 2h, 1d ago, 14:30, 2026-01-31T09:00, or seconds "
        "since 1970",
    )
    parser.add_argument(
        "--level",
        choices=LEVELS,
        help="only lines of this level and above; debug has each step (default info, or debug "
        "with --kind)",
    )
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        metavar="KIND",
        help=f"only events of this kind, as in restored; {OUTPUT} is what processes print; "
        "repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print an object of JSON a line")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the history; with ``--follow`` until the job ends."""
    if not args.run_dir.is_dir():
        raise NotFoundError(
            f"{args.run_dir}: no such directory; give the one that `holdfast run --run-dir` got"
        )
    if not (args.run_dir / KEY).exists() and not any(args.run_dir.glob(EVENTS_PATTERN)):
        raise NotFoundError(
            f"{args.run_dir}: no job was started here, there are no events; give the directory "
            "that `holdfast run --run-dir` got"
        )
    printer = _Printer(args)
    history = RunHistory(args.run_dir)
    if args.follow:
        return _follow(args, history, printer)
    for entry in history.new(unfinished=True):
        printer.take(entry)
    printer.explain()
    return 0


class _Printer:
    """Prints the wanted entries; ``last_s`` is the time of the last entry that was read."""

    def __init__(self, args: argparse.Namespace) -> None:
        level = args.level or ("debug" if args.kind else "info")
        self._wanted = Wanted(
            since_s=args.since,
            least=Importance[level.upper()],
            nodes=frozenset(args.node),
            kinds=frozenset(args.kind),
        )
        self._json = args.json
        self._nodes: set[str] = set()
        self._kinds: set[str] = set()
        self.seen = self.printed = 0
        self.last_s = 0.0

    def take(self, entry: HistoryLine) -> None:
        """Print an entry if it is wanted."""
        self.seen += 1
        self._nodes.add(entry.node)
        self._kinds.add(entry.kind)
        self.last_s = max(self.last_s, entry.time_s)
        if self._wanted.takes(entry):
            self.printed += 1
            line = as_json(entry) if self._json else printable(as_text(entry), lines=True)
            sys.stdout.write(line + "\n")

    def explain(self) -> None:
        """Say on stderr why nothing was printed, where names may be wrong."""
        if self.printed:
            return
        if strange := self._wanted.nodes - self._nodes:
            nodes = ", ".join(sorted(self._nodes - {"?"}))
            say(f"no node {', '.join(sorted(strange))} is in it; there are {nodes}", stderr=True)
        elif strange := self._wanted.kinds - self._kinds:
            known = strange & {*KINDS, OUTPUT, DAMAGED}
            why = "happened" if known else "is in it; docs/reference/events.md lists the kinds"
            say(f"nothing of the kind {', '.join(sorted(strange))} {why}", stderr=True)
        else:
            say("nothing matches; --level debug and no --since show all", stderr=True)


def _follow(args: argparse.Namespace, history: RunHistory, printer: _Printer) -> int:
    heard_s = time.monotonic()
    try:
        while True:
            before = printer.seen
            for entry in history.new():
                printer.take(entry)
            sys.stdout.flush()
            if history.ended and before == printer.seen:
                break  # the last word is said, and nothing came behind it
            now_s = time.monotonic()
            if before != printer.seen:
                heard_s = now_s
            elif now_s - heard_s > _QUIET_S:
                heard_s = now_s
                _check_job(args.run_dir)
            time.sleep(_POLL_S)
        for entry in history.new(unfinished=True):
            printer.take(entry)
        printer.explain()
        return 0
    except KeyboardInterrupt:
        say(_how_to_go_on(args, printer.last_s), stderr=True)
        raise


def _check_job(run_dir: Path) -> None:
    """Raise ``PeerError`` if no node of the job answers any more."""
    try:
        ask(run_dir)
    except PeerError as error:
        raise PeerError(
            f"{error}; what was told is printed: `holdfast logs {run_dir} --follow` again once the "
            "job is started again"
        ) from error
    except CkptError:
        return  # it starts, or it is just over


def _how_to_go_on(args: argparse.Namespace, last_s: float) -> str:
    words = ["holdfast", "logs", str(args.run_dir), "--follow"]
    for name in args.node:
        words += ["--node", name]
    for kind in args.kind:
        words += ["--kind", kind]
    if args.level:
        words += ["--level", args.level]
    words += ["--json"] if args.json else []
    if last_s:
        moment = datetime.fromtimestamp(last_s, UTC).isoformat(timespec="milliseconds")
        words += ["--since", moment.replace("+00:00", "Z")]
    return f"the job goes on; this continues here: {shlex.join(words)}"


def _since(text: str) -> float:
    try:
        return parse_since(text, now_s=time.time())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
