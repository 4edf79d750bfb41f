"""`holdfast doctor`: examine the machine, a plan and a running job; pack a bundle for a report."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.text import Text

from holdfast.ckpt.errors import ArgumentError
from holdfast.ckpt.parity.estimate import memory_need
from holdfast.ckpt.parity.groups import GROUP_SIZE
from holdfast.elastic.addresses import checked_host
from holdfast.elastic.channel.shared_key import shared_key_file
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.launch.run_folder import KEY
from holdfast.tools.commands.run_settings import parity_number
from holdfast.tools.doctor import surroundings, trying
from holdfast.tools.doctor.bundle import MOST_BYTES, pack, show_packed
from holdfast.tools.doctor.facts import PlanFacts
from holdfast.tools.doctor.findings import Finding, Verdict
from holdfast.tools.doctor.machine import judge_machine
from holdfast.tools.doctor.nodes import examine_job
from holdfast.tools.doctor.reading import read_machine
from holdfast.tools.show.node_status import NodeStatus
from holdfast.tools.subcommand import HelpFormatter, Subparsers, positive, positive_number
from holdfast.tools.terminal import console, parse_bytes, print_json

_EPILOG: Final = """\
examples:
  holdfast doctor                                       this machine
  holdfast doctor --state 12GiB --nproc 8 --nnodes 4    against a plan: four machines of eight ranks
  holdfast doctor --checkpoint /data/runs --state 12GiB --every 600
  holdfast doctor --host 10.0.0.7 --port 29400 --reach head:29400
  holdfast doctor runs/live                             and the job that runs there
  holdfast doctor runs/live --bundle report.tar.gz      for a bug report, secrets removed
Exit code 1 if there is a failure; warnings alone are 0.
"""
_STYLES: Final = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "bold red"}
_RUN_DIR_BYTES: Final = 1 << 20


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "doctor",
        help="find what would keep a job from running well, with the remedy",
        description="Examines this machine, and with RUN_DIR the job that runs there: shared "
        "memory, limits, disks, addresses, permissions, clocks, versions. Each finding says what "
        "was found, why it matters and what helps. It changes nothing; it writes a file of up to "
        "64 MiB in the places given, and removes it.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="run directory of a job")
    add("--json", action="store_true", help="print JSON")
    plan = parser.add_argument_group("the plan, as `holdfast run` gets it")
    add = plan.add_argument
    add("--state", type=parse_bytes, default=0, metavar="SIZE", help="state of the largest rank")
    add("--nproc", type=positive, default=1, metavar="N", help="ranks per node (default 1)")
    add("--nodes", type=positive, default=1, metavar="K", help="nodes on this machine (default 1)")
    add("--nnodes", type=positive, default=1, metavar="M", help="machines (default 1)")
    add(
        "--parity",
        type=parity_number,
        metavar="M",
        help="nodes that may be lost, or 'replicate' (default 1, 0 on one node)",
    )
    add("--parity-group", type=positive, default=GROUP_SIZE, metavar="N", help="nodes of a group")
    add("--memory", type=parse_bytes, default=0, metavar="SIZE", help="memory for snapshots")
    add("--keep", type=positive, default=1, metavar="N", help="snapshots that stay (default 1)")
    places = parser.add_argument_group("places and addresses that the job will use")
    add = places.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="directory of checkpoints")
    add("--every", type=positive_number, default=0.0, metavar="S", help="seconds between two")
    add("--disk", type=Path, metavar="DIR", help="directory of the disk tier")
    add("--key-file", metavar="FILE", help="key of several machines (default: as `holdfast run`)")
    add("--host", default="", metavar="ADDRESS", help="this machine's address for the others")
    add("--port", type=_port, metavar="P", help="port on which the coordinator is to listen")
    add(
        "--reach",
        type=_place,
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="address that this machine must reach; repeatable",
    )
    bundle = parser.add_argument_group("a bundle for a bug report")
    bundle.add_argument(
        "--bundle",
        type=Path,
        metavar="FILE",
        help="pack events, logs, statuses, findings and versions into FILE.tar.gz, without secrets",
    )
    bundle.add_argument(
        "--bundle-size",
        type=parse_bytes,
        default=MOST_BYTES,
        metavar="SIZE",
        help="most bytes of content; of what is larger, the newest part is packed (default 64MiB)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if one is a failure. With ``--bundle`` return 0 once packed."""
    if args.bundle is not None and args.run_dir is None:
        raise ConfigError("--bundle needs RUN_DIR: the events and logs are there")
    plan = planned(args)
    findings = [*judge_machine(read_machine(), plan), *_tried(args, plan)]
    nodes: list[NodeStatus] = []
    if args.run_dir is not None:
        about_job, nodes = examine_job(args.run_dir)
        findings += [*_of_run_dir(args.run_dir), *about_job]
    if args.bundle is not None:
        packed = pack(
            args.bundle,
            args.run_dir,
            findings=findings,
            nodes=nodes,
            plan=plan,
            most_bytes=args.bundle_size,
        )
        if args.json:
            print_json(packed)
        else:
            show_packed(console(), packed)
        return 0
    count = {verdict: sum(each.verdict is verdict for each in findings) for verdict in Verdict}
    if args.json:
        print_json({"findings": findings, **{str(name): number for name, number in count.items()}})
    else:
        show(console(), findings)
    return 1 if count[Verdict.FAILURE] else 0


def planned(args: argparse.Namespace) -> PlanFacts:
    """Return the facts of the plan that the command line gives."""
    nodes = args.nodes * args.nnodes
    parity = args.parity if args.parity is not None else min(1, nodes - 1)
    facts = PlanFacts(
        rank_bytes=args.state,
        nodes=args.nodes,
        ranks_per_node=args.nproc,
        parity=str(parity),
        budget_bytes=args.memory,
    )
    try:
        need = memory_need(
            args.state or 1,
            nodes=nodes,
            ranks_per_node=args.nproc,
            parity=parity,
            group=args.parity_group,
            keep=args.keep,
        )
    except ArgumentError as error:
        return msgspec.structs.replace(facts, refusal=str(error))
    if not args.state:
        return facts
    return msgspec.structs.replace(facts, need_bytes=need.total, lent_bytes=need.lent)


def _tried(args: argparse.Namespace, plan: PlanFacts) -> Iterator[Finding]:
    size_bytes = plan.rank_bytes * plan.ranks
    for purpose, place, every_s in (
        ("checkpoint", args.checkpoint, args.every),
        ("snapshot", args.disk, 0.0),
    ):
        if place is not None:
            tried = trying.try_disk(purpose, place, size_bytes=size_bytes, every_s=every_s)
            yield surroundings.disk(tried)
    yield surroundings.private(trying.look_at("key file", shared_key_file(args.key_file)))
    yield surroundings.address(trying.try_loopback())
    host = checked_host(args.host, given="--host") if args.host else "127.0.0.1"
    if args.host:
        yield surroundings.address(trying.try_host(host))
    if args.port:
        yield surroundings.address(trying.try_port(host, args.port))
    for place in args.reach:
        yield surroundings.address(trying.try_to_reach(*place))


def _of_run_dir(run_dir: Path) -> Iterator[Finding]:
    yield surroundings.private(trying.look_at("run directory", run_dir, directory=True))
    yield surroundings.private(trying.look_at("run key", run_dir / KEY))
    tried = trying.try_disk(
        "run directory", run_dir, size_bytes=0, every_s=0.0, most_bytes=_RUN_DIR_BYTES
    )
    yield surroundings.disk(tried)


def show(shown: Console, findings: list[Finding]) -> None:
    """Print the findings for people, the worst last, and their number."""
    order = list(Verdict)
    for each in sorted(findings, key=lambda found: order.index(found.verdict)):
        word = f"{each.verdict:<7} "
        shown.print(Text.assemble((word, _STYLES[each.verdict]), f"{each.check}: {each.found}"))
        for text in (f"why: {each.why}", f"remedy: {each.remedy}") if each.remedy else ():
            shown.print(Text(f"{'':8}{text}"))
    numbers = [
        f"{sum(each.verdict is verdict for each in findings)} {verdict}" for verdict in order
    ]
    shown.print(Text(", ".join(numbers), style="bold"))


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host:
        raise argparse.ArgumentTypeError(f"{text!r}: give HOST:PORT")
    return host, _port(port)
