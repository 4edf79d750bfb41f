"""``holdfast plan``: memory, overhead, losses and the best intervals of a job before it runs."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from holdfast.ckpt import sizes
from holdfast.ckpt.checkpoints.retention_rules import parse_duration
from holdfast.elastic.errors import ConfigError
from holdfast.tools.commands.run_settings import parity_number
from holdfast.tools.plan.bursts import loss_at_once
from holdfast.tools.plan.forecast import YEAR_S, Forecast, alternatives, best
from holdfast.tools.plan.job import PlannedJob
from holdfast.tools.plan.picture import name, picture
from holdfast.tools.plan.reading import KnownNumbers, known_numbers
from holdfast.tools.plan.reasons import chance, reasons, share, span, steps
from holdfast.tools.subcommand import HelpFormatter, Subparsers, positive, positive_number
from holdfast.tools.terminal import console, parse_bytes, print_json, readable

_EXAMPLES = """\
examples:
  holdfast plan --params 7B --nodes 16 --nproc 8 --step-s 4 --mtbf 250d
  holdfast plan --params 70B --nodes 128 --step-s 12 --network 50GB/s --store 40GB/s --svg plan.svg
  holdfast plan --state 900GiB --nodes 64 --step-s 9 --racks 8 --rack-mtbf 2y --parity 2
  holdfast plan --from runs/live --nodes 512                 sizes and times of a run, for 512 nodes
  holdfast plan --params 7B --nodes 16 --step-s 4 --checkpoint-every 500 --snapshot-every 1

Rates are bytes per second: a line of 100 Gbit/s is 12.5GB/s. Durations are 90s, 30m, 12h, 7d, 2y.
"""
_COUNTS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_MTBF: Final = "264d"
"""Llama 3's 419 unexpected interruptions in 54 days on 2,048 nodes of 8 GPUs (Grattafiori et al.,
"The Llama 3 Herd of Models", 2024, section 3.3.4)."""
_OUTAGE: Final = "30d"


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "plan",
        help="forecast memory, overhead, losses and the best intervals of a job",
        description="Forecasts a job before it runs: memory for each node, the cost of snapshots, "
        "the chance that memory loses steps, the expected goodput, and the intervals between "
        "snapshots and between checkpoints that are best.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    _declare_job(parser.add_argument_group("the job").add_argument)
    _declare_failures(parser.add_argument_group("failures").add_argument)
    _declare_machines(parser.add_argument_group("machines").add_argument)
    _declare_settings(parser.add_argument_group("settings").add_argument)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print JSON")
    add("--svg", type=Path, metavar="FILE", help="write a picture to FILE")
    return parser


def _declare_job(add: Callable[..., Any]) -> None:
    add("--params", type=_count, metavar="N", help="parameters of the model, as in 7B or 350M")
    add(
        "--bytes-per-param",
        type=positive_number,
        default=12.0,
        metavar="B",
        help="bytes of state for each parameter (default %(default)g: float32 weights and AdamW's "
        "moments; 14 with bfloat16 weights beside float32 ones)",
    )
    add("--state", type=parse_bytes, metavar="SIZE", help="size of the whole state, each byte once")
    add(
        "--from",
        dest="source",
        metavar="PATH",
        help="take what is known from the checkpoints or the run directory at PATH; options count "
        "more",
    )
    add("--nodes", type=positive, metavar="N", help="nodes")
    add("--nproc", type=positive, metavar="N", help="workers of a node (default 8)")
    add("--step-s", type=positive_number, metavar="S", help="seconds of a step without snapshots")
    add(
        "--frozen",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="share of the state that never changes, as in 0.95 for an adapter (default 0)",
    )
    add(
        "--work",
        type=_duration,
        default="30d",
        metavar="TIME",
        help="time that the job would take without failures and saves (default %(default)s)",
    )


def _declare_failures(add: Callable[..., Any]) -> None:
    add(
        "--mtbf",
        type=_duration,
        default=_MTBF,
        metavar="TIME",
        help="mean time between failures of one node (default %(default)s: a node of 8 GPUs in "
        "the training of Llama 3)",
    )
    add(
        "--worker-mtbf",
        type=_duration,
        metavar="TIME",
        help="mean time between deaths of one worker process that spare its node (default: none)",
    )
    add("--racks", type=positive, metavar="N", help="racks that fail as a whole (default: none)")
    add(
        "--rack-mtbf",
        type=_duration,
        metavar="TIME",
        help="mean time between failures of one rack (default: 5y, with --racks)",
    )
    add(
        "--feeds",
        type=positive,
        metavar="N",
        help="power feeds, or halls, that fail with all of their racks (default: none)",
    )
    add(
        "--feed-mtbf",
        type=_duration,
        metavar="TIME",
        help="mean time between failures of one power feed (default: 5y, with --feeds)",
    )
    add(
        "--outage-mtbf",
        type=_duration,
        default=_OUTAGE,
        metavar="TIME",
        help="mean time until the whole job is lost with all memory: power, maintenance, the end "
        "of an allocation (default %(default)s)",
    )


def _declare_machines(add: Callable[..., Any]) -> None:
    rate = {"type": _rate, "metavar": "RATE"}
    add("--network", default="12.5GB/s", help="a node's network (default %(default)s)", **rate)
    add("--disk", default="2GB/s", help="a node's checkpoint writes (default %(default)s)", **rate)
    add("--store", help="the checkpoint store, all nodes together (default: no limit)", **rate)
    add(
        "--memory-speed",
        default="10GB/s",
        help="copies in a node's memory (default %(default)s)",
        **rate,
    )
    add(
        "--memory",
        type=parse_bytes,
        metavar="SIZE",
        help="host memory that a node may spend on snapshots: says whether they fit",
    )
    cost = {"type": _seconds, "metavar": "S"}
    add(
        "--snapshot-cost-s",
        help="training time that a snapshot takes, as `holdfast bench lost` measures it (default: "
        "one copy of the node's changing state)",
        **cost,
    )
    add(
        "--checkpoint-cost-s",
        help="training time that a checkpoint takes (default: three copies of the node's state)",
        **cost,
    )
    add("--protect-s", help="time from a step to its protection (default: by the rates)", **cost)
    add(
        "--recovery-s",
        default=20.0,
        help="time of a recovery from memory without its transfers (default %(default)g)",
        **cost,
    )
    add(
        "--restart-s",
        default=600.0,
        help="time to start the job again, without reading the checkpoint (default %(default)g)",
        **cost,
    )


def _declare_settings(add: Callable[..., Any]) -> None:
    add(
        "--parity",
        type=parity_number,
        metavar="M",
        help="nodes of a group that may be lost, or 'replicate' (default 1)",
    )
    add(
        "--parity-group", type=positive, default=8, metavar="N", help="nodes of a group (default 8)"
    )
    add("--keep", type=positive, default=1, metavar="N", help="snapshots that stay (default 1)")
    add("--snapshot-every", type=positive, metavar="K", help="price this interval, in steps")
    add("--checkpoint-every", type=positive, metavar="K", help="price this interval, in steps")


def run(args: argparse.Namespace) -> int:
    """Forecast, print and draw; 0 if the job can end."""
    known = known_numbers(args.source) if args.source else KnownNumbers()
    job = planned(args, known)
    found = best(job, every=args.snapshot_every, checkpoint=args.checkpoint_every)
    others = [found if each.job.parity == job.parity else each for each in alternatives(job)]
    said = reasons(found, others, budget=args.memory)
    if args.svg:
        args.svg.write_text(picture(others, chosen=found), encoding="utf-8")
    if args.json:
        print_json(
            {
                "plan": record(found),
                "alternatives": [record(each) for each in others],
                "reasons": said,
                "from": known.origin or None,
            }
        )
    else:
        _print(found, others, said, known.origin)
    return 0 if found.goodput else 1


def planned(args: argparse.Namespace, known: KnownNumbers) -> PlannedJob:
    """Return the job that the arguments describe. Raises ``ConfigError`` for what is missing."""
    given = {
        "state_bytes": args.state
        or (args.params and math.ceil(args.params * args.bytes_per_param)),
        "nodes": args.nodes,
        "workers": args.nproc,
        "step_s": args.step_s,
        "protect_s": args.protect_s,
        "store": args.store,
    }
    values = {**known.values, **{key: each for key, each in given.items() if each is not None}}
    needed = {
        "state_bytes": "--params N or --state SIZE",
        "nodes": "--nodes N",
        "step_s": "--step-s S",
    }
    if missing := [option for key, option in needed.items() if key not in values]:
        raise ConfigError(f"a plan needs more: give {', '.join(missing)}, or --from PATH")
    parity = args.parity if args.parity is not None else min(1, values["nodes"] - 1)
    return PlannedJob(
        **values,
        node_mtbf_s=args.mtbf,
        worker_mtbf_s=args.worker_mtbf,
        racks=args.racks or 0,
        rack_mtbf_s=(args.rack_mtbf or 5 * YEAR_S) if args.racks else args.rack_mtbf,
        feeds=args.feeds or 0,
        feed_mtbf_s=(args.feed_mtbf or 5 * YEAR_S) if args.feeds else args.feed_mtbf,
        outage_mtbf_s=args.outage_mtbf,
        parity=parity,
        group=args.parity_group,
        keep=args.keep,
        moving=1.0 - args.frozen,
        network=args.network,
        disk=args.disk,
        memory_speed=args.memory_speed,
        snapshot_cost_s=args.snapshot_cost_s,
        checkpoint_cost_s=args.checkpoint_cost_s,
        recovery_s=args.recovery_s,
        restart_s=args.restart_s,
        useful_s=args.work,
    )


def record(found: Forecast) -> dict[str, Any]:
    """Return a forecast as plain values: bytes, seconds, steps, shares from 0 to 1.

    A time without end is null.
    """
    finite = {
        key: value if math.isfinite(value) else None
        for key, value in {
            "wall_s": found.wall_s,
            **dataclasses.asdict(found.classic),
        }.items()
    }
    return {
        "parity": found.job.parity,
        "group": found.job.group,
        "snapshot_every": found.intervals.snapshot,
        "checkpoint_every": found.intervals.checkpoint,
        "goodput": found.goodput,
        **finite,
        "costs": dataclasses.asdict(found.costs),
        "memory_bytes": found.memory.total,
        "lent_bytes": found.memory.lent,
        "snapshot_cost_s": found.job.snapshot_s,
        "protect_s": found.job.protection_s,
        "checkpoint_cost_s": found.job.checkpoint_s,
        "persist_s": found.job.persist_s,
        "failures_per_day": {
            "memory": found.rates.soft * 86400,
            "lost": found.rates.lost * 86400,
            "outage": found.rates.outage * 86400,
        },
        "lost_work_s": list(found.lost_work_s),
        "loss_within_job": found.chance_of_loss(found.wall_s),
        "loss_within_year": found.chance_of_loss(YEAR_S),
        "loss_at_once": {
            str(count): loss_at_once(found.job, count) for count in _bursts(found.job)
        },
    }


def _bursts(job: PlannedJob) -> list[int]:
    """Return the numbers of nodes for which the plan says what their loss at once costs.

    One more than parity makes good, and 1 % and 5 % of the nodes.
    """
    least = job.lost_with_memory + 1
    return sorted({least, *(n for n in (job.nodes // 100, job.nodes // 20) if n > least)})


def _print(found: Forecast, others: list[Forecast], said: list[str], origin: str) -> None:
    job, out = found.job, console()
    out.print(
        f"{readable(job.state_bytes)} of state on {job.nodes} nodes of {job.workers}; one node "
        f"fails every {span(job.node_mtbf_s / job.nodes)}" + (f" ({origin})" if origin else "")
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    rows = [
        ("goodput", f"{found.goodput:.2%}: {span(job.useful_s)} of work take {span(found.wall_s)}"),
        ("snapshot", steps(found.intervals.snapshot)),
        ("checkpoint", steps(found.intervals.checkpoint)),
        (
            "memory of a node",
            f"{readable(found.memory.total)}, and {readable(found.memory.lent)} if there is room",
        ),
        (
            "memory loses steps",
            f"{chance(found.chance_of_loss(found.wall_s))} in this job, "
            f"{chance(found.chance_of_loss(YEAR_S))} in a year",
        ),
        (
            "nodes lost at once",
            ", ".join(f"{count}: {chance(loss_at_once(job, count))}" for count in _bursts(job)),
        ),
        (
            "time lost",
            f"{share(found.costs.snapshots)} snapshots, "
            f"{share(found.costs.checkpoints)} checkpoints, {share(found.costs.from_memory)} "
            f"recoveries from memory, {share(found.costs.from_store)} from the store",
        ),
    ]
    for row in rows:
        table.add_row(*row)
    out.print(table)
    out.print()
    _print_others(found, others)
    out.print()
    for line in said:
        out.print(line)


def _print_others(found: Forecast, others: list[Forecast]) -> None:
    table = Table(
        "",
        "goodput",
        "snapshot",
        "checkpoint",
        "memory of a node",
        "memory loses steps",
        box=None,
        pad_edge=False,
    )
    for each in others:
        mark = " *" if each is found else ""
        table.add_row(
            name(each) + mark,
            f"{each.goodput:.2%}",
            steps(each.intervals.snapshot),
            steps(each.intervals.checkpoint),
            readable(each.memory.total),
            f"{chance(each.chance_of_loss(each.wall_s))} in this job",
        )
    console().print(table)


def _count(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMBGT]?)", text.upper())
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters, as in 7B")
    return float(match[1]) * _COUNTS[match[2]]


def _duration(text: str) -> float:
    try:
        found = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: give more than no time, as in 250d")
    return found


def _rate(text: str) -> float:
    try:
        return float(sizes.parse_rate(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 up")
    return found


def _share(text: str) -> float:
    found = _seconds(text)
    if found >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 up to below 1")
    return found
