"""`holdfast status`: ask the sidecars of a running job how well it is protected."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from rich.live import Live

from holdfast.ckpt.errors import CkptError, NotFoundError, PeerError
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.reporting import NodeProcesses, read_all_processes
from holdfast.elastic.events import JobEnded, decode
from holdfast.elastic.events.log import events_file
from holdfast.tools.show.node_status import NodeStatus
from holdfast.tools.show.prometheus import exposition
from holdfast.tools.show.status_view import view
from holdfast.tools.subcommand import HelpFormatter, Subparsers
from holdfast.tools.terminal import console, print_json

_TIMEOUT_S: Final = 3.0
_AT_ONCE: Final = 32

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
        print(exposition(nodes), end="", flush=True)
    else:
        console().print(view(nodes))


def ask(run_dir: Path) -> list[NodeStatus]:
    """Return the status of every node of the job in ``run_dir``.

    Raises ``NotFoundError`` if there is no job or it is over, and ``PeerError`` if no node answers.
    A single node that does not answer is in the list with the reason.
    """
    key = _key(run_dir)
    listed = read_all_processes(run_dir)
    if (ending := _ending(run_dir)) is not None:
        raise NotFoundError(f"{run_dir}: the job is over ({ending}); events and logs are there")
    if not listed:
        raise NotFoundError(f"{run_dir}: the job is starting, no node has a sidecar yet; try again")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        nodes = list(pool.map(lambda item: _ask_node(*item, key=key), listed.items()))
    if not any(node.status for node in nodes):
        errors = "; ".join(f"{node.node}: {node.error}" for node in nodes)
        raise PeerError(f"{run_dir}: no sidecar answers, the job was killed or stopped ({errors})")
    return nodes


def _key(run_dir: Path) -> RunKey:
    if not run_dir.is_dir():
        raise NotFoundError(
            f"{run_dir}: no such directory; give the directory that `holdfast run --run-dir` got"
        )
    path = run_dir / "key.json"
    if not path.exists():
        raise NotFoundError(
            f"{run_dir}: no job was started here (there is no key.json); give the directory that "
            "`holdfast run --run-dir` got"
        )
    return RunKey.load(path)


def _ending(run_dir: Path) -> str | None:
    """Return how the job ended, None while it runs."""
    try:
        lines = events_file(run_dir, "launcher").read_bytes().splitlines()
    except FileNotFoundError:
        return None
    match decode(lines[-1]) if lines else None:
        case JobEnded(message=message):
            return message or "completed"
        case _:
            return None


def _ask_node(node: str, found: NodeProcesses, *, key: RunKey) -> NodeStatus:
    status: dict[str, Any] = {}
    error = None
    if not found.address:
        error = "its sidecar is down; its agent starts another"
    else:
        client = SidecarClient(found.address, key, timeout_s=_TIMEOUT_S)
        try:
            status = client.status()
        except CkptError as failed:
            error = str(failed)
        finally:
            client.close()
    return NodeStatus(
        node=node,
        sidecar=found.sidecar,
        workers=found.workers,
        status=status,
        error=error,
        stragglers=found.stragglers,
        data_troubles=found.data_troubles,
        unreachable=found.unreachable,
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 up")
    return seconds
