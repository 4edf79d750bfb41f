"""``holdfast ray``: run a script on the nodes of a Ray cluster."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from holdfast.adapters.ray import RayJobFailedError, RayOptions, launch
from holdfast.tools.commands import run_settings
from holdfast.tools.printing import printable
from holdfast.tools.subcommand import HelpFormatter, Subparsers, positive, positive_number

_EXAMPLES = """\
examples:
  holdfast ray submit --nodes 2:8 --nproc 8 --cpus 16 --gpus 8 train.py --epochs 3
  holdfast ray submit --nodes 4 --working-dir . train.py        Ray copies this folder to the nodes
  ray job submit --working-dir . -- holdfast ray submit --nodes 2:8 train.py

Run it on a machine of the cluster. It connects as Ray's own programs do (RAY_ADDRESS), shows the
output of all nodes, and ends with the job: 0 if it is done, 1 if it failed. Ctrl-C ends the job.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "ray",
        help="run a script on the nodes of a Ray cluster",
        description="Run a script with Ray as the engine that places its nodes.",
        formatter_class=HelpFormatter,
    )
    inner = parser.add_subparsers(dest="ray", metavar="COMMAND", required=True)
    submit = inner.add_parser(
        "submit",
        help="run SCRIPT on nodes that Ray places",
        description="Run SCRIPT on nodes that Ray places, one `holdfast run` on each. The job "
        "begins with the least number of nodes. Every further node that the cluster has or gets "
        "joins, a node that Ray drains hands over and leaves, and one that is lost is replaced.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    _declare(submit)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the job; 0 if it is done, 1 if it failed, 143 after SIGTERM."""
    least, most = args.nodes
    told = _Terminations()
    try:
        launch(
            args.script,
            args.args,
            nodes=(least, most),
            nproc=args.nproc,
            resources=_resources(args),
            options=RayOptions(
                address=args.address,
                working_dir=str(args.working_dir or ""),
                env=dict(args.env),
                coordinator=args.coordinator,
                settings=run_settings.settings(args),
                roles=dict(args.role),
                module=args.module,
                run_options=tuple(args.run_option),
                run_dir=str(args.run_dir.absolute()) if args.run_dir else "",
                wait_s=args.wait_s,
                grace_s=args.grace_s,
            ),
        )
    except RayJobFailedError as error:
        print(printable(f"holdfast: {error}", lines=True), file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        if not told.seen:
            raise
        print("terminated", file=sys.stderr, flush=True)
        return 128 + signal.SIGTERM
    return 0


class _Terminations:
    """Notes that SIGTERM came, which Ray's calls make an interrupt like that of Ctrl-C."""

    def __init__(self) -> None:
        self.seen = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if callable(self._before):
            self._before(number, frame)
            return
        raise KeyboardInterrupt


def _declare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--nodes",
        type=_nodes,
        default=(1, 1),
        metavar="N|MIN:MAX",
        help="number of nodes: the job begins with MIN, and grows to MAX as the cluster has room "
        "(default 1)",
    )
    add("--nproc", type=positive, default=1, metavar="N", help="trainers per node (default 1)")
    add(
        "--cpus",
        type=positive_number,
        metavar="N",
        help="CPUs that a node needs (default: one for each trainer)",
    )
    add("--gpus", type=positive_number, metavar="N", help="GPUs that a node needs (default: none)")
    add(
        "--resource",
        type=_resource,
        action="append",
        default=[],
        metavar="NAME=N",
        help="another resource that a node needs, by Ray's name for it; repeatable",
    )
    add(
        "--address",
        default="",
        metavar="HOST:PORT",
        help="address of the cluster (default: RAY_ADDRESS, else the cluster of this machine)",
    )
    add(
        "--working-dir",
        type=Path,
        metavar="DIR",
        help="folder that Ray copies to the nodes and in which SCRIPT is run (default: the current "
        "folder, which all nodes must see at the same path)",
    )
    add(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable for SCRIPT on all nodes; repeatable",
    )
    add(
        "--coordinator",
        default="",
        metavar="URL",
        help="etcd://HOST:PORT[,HOST:PORT...] of an etcd (default: this command runs the "
        "coordinator)",
    )
    run_settings.add_roles(add)
    run_settings.add_options(add)
    add(
        "--run-option",
        action="append",
        default=[],
        metavar="WORD",
        help="a further option of `holdfast run`, as in --run-option=--preload=torch; repeatable",
    )
    add(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="keep events and logs of each node in DIR/NODE there, NODE being its id in Ray",
    )
    add(
        "--wait-s",
        type=positive_number,
        default=RayOptions().wait_s,
        metavar="S",
        help="give up if the cluster has too few nodes for S seconds (default %(default)g)",
    )
    add(
        "--grace-s",
        type=positive_number,
        default=RayOptions().grace_s,
        metavar="S",
        help="seconds in which a node that Ray drains has to hand over (default %(default)g)",
    )
    run_settings.add_module(add)
    add("script", metavar="SCRIPT", help="Python script to run")
    add("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def _resources(args: argparse.Namespace) -> dict[str, float]:
    found = {"CPU": args.cpus or float(args.nproc), **dict(args.resource)}
    return {**found, "GPU": args.gpus} if args.gpus else found


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: give N or MIN:MAX")
    return int(least), int(most or least)


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=N")
    return name, positive_number(amount)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VALUE")
    return name, value
