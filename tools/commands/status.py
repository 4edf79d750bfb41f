"""`holdfast status`: ask the sidecars of a running job how well it is protected."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Final

from rich.live import Live

from holdfast.tools.live.asking import ask
from holdfast.tools.show.node_status import NodeStatus
from holdfast.tools.show.status_view import view
from holdfast.tools.subcommand import HelpFormatter, Subparsers
from holdfast.tools.terminal import console, print_json

_EPILOG: Final = """\
examples:
  holdfast run --run-dir runs/live --nodes 3 train.py &
  holdfast status runs/live                 snapshots and costs of each node
  holdfast status runs/live --watch 2       the same, again every two seconds
  holdfast status runs/live --json | jq '.nodes[].status.protected'
  holdfast status runs/live --prometheus    for a scraper's text file collector
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "status",
        help="show how well a running job is protected, and the cost of it",
        description="Shows the state of a running job's sidecars: the newest protected step and "
        "its age, the time that protecting takes, the cost of each stage, memory, and problems. "
        "The command does not disturb the training.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="the directory that `holdfast run --run-dir` got",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, one line each time")
    form.add_argument(
        "--prometheus", action="store_true", help="print Prometheus' text exposition format"
    )
    parser.add_argument(
        "--watch",
        type=_seconds,
        metavar="SECONDS",
        help="repeat every SECONDS until Ctrl-C",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the status once, or until the job is over."""
    if args.watch is None:
        _print(args, ask(args.run_dir))
        return 0
    shown = console()
    if args.json or args.prometheus or not shown.is_terminal:
        while True:
            _print(args, ask(args.run_dir))
            time.sleep(args.watch)
    with Live(view(ask(args.run_dir)), console=shown, auto_refresh=False) as live:
        while True:
            time.sleep(args.watch)
            live.update(view(ask(args.run_dir)), refresh=True)


def _print(args: argparse.Namespace, nodes: list[NodeStatus]) -> None:
    if args.json:
        print_json({"nodes": {node.node: node for node in nodes}})
    elif args.prometheus:
        from holdfast.tools.metrics.exposition import exposition  # needs the extra metrics
        from holdfast.tools.metrics.status_samples import status_samples

        print(exposition(status_samples(nodes)), end="", flush=True)
    else:
        console().print(view(nodes))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 up")
    return seconds
