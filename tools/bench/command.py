"""`holdfast bench`: measure Holdfast beside the limits of this machine and other tools."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from holdfast.ckpt.errors import CapacityError, StoreError
from holdfast.ckpt.memory.arena import ARENA_ROOT
from holdfast.ckpt.native.streaming import kernel
from holdfast.elastic.errors import ConfigError
from holdfast.tools.bench.progress import measured
from holdfast.tools.bench.results import STDOUT, BenchResults
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Figure
from holdfast.tools.bench.sections import NEED_STORE, OF_ENGINES, SECTIONS, Result
from holdfast.tools.bench.tables import show
from holdfast.tools.environment import cores, cpu_s
from holdfast.tools.subcommand import Subparsers, positive, positive_number

_SLACK_BYTES: Final = 64 << 20
_PLAIN_WIDTH: Final = 136
_MEGABYTES: Final = 512
_QUICK_MEGABYTES: Final = 32
_WIDTHS: Final = (64, 128, 256)
_LEAST_MBIT, _MOST_MBIT = 0.1, 10_000.0


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "bench",
        help="measure snapshots, checkpoints and parity on this machine",
        description="Times Holdfast's data path in turn with a physical reference (memcpy, a "
        "plain file, a plain connection) and with other tools (DCP is "
        "torch.distributed.checkpoint), and shows medians. A ratio below 1 means that Holdfast "
        "is faster.",
    )
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="NAME",
        help=f"sections to measure (default: all): {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--megabytes",
        type=positive,
        metavar="M",
        help=f"size of the state in MiB (default: {_MEGABYTES}; with --quick: {_QUICK_MEGABYTES})",
    )
    parser.add_argument(
        "--repeat",
        type=positive,
        default=5,
        metavar="N",
        help="measured rounds after the warm-up (default: 5)",
    )
    parser.add_argument("--quick", action="store_true", help="use a small state and few ranks")
    parser.add_argument(
        "--minutes",
        type=positive_number,
        metavar="M",
        help="minutes of training in the goodput section (default: 5; with --quick: a few seconds)",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="directory for temporary files of the benchmark (default: the system's)",
    )
    parser.add_argument(
        "--store",
        metavar="ROOT",
        help="object store of the sections store and lines, as in az://container/prefix (default: "
        "they are left out)",
    )
    parser.add_argument(
        "--server",
        type=_processes,
        default=(),
        metavar="PID[,PID]",
        help="processes of that store's server on this machine, whose processor time is shown too",
    )
    parser.add_argument(
        "--lines",
        type=_limits,
        default=(),
        metavar="MBIT[,MBIT]",
        help="limits of the section lines in Mbit/s, 0 for none, as in 5,1 (default: "
        "0,100,20,5,1; with --quick: 0,20)",
    )
    parser.add_argument(
        "--width",
        type=int,
        choices=_WIDTHS,
        default=_WIDTHS[0],
        help="width of the model of the sections islands and lines (default: 64, with 0.24 million "
        "parameters; 256: 3.3 million)",
    )
    parser.add_argument(
        "--engine",
        choices=tuple(OF_ENGINES),
        help="measure the section rl with servers of this engine, which must be on the PATH",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the figures and every sample as JSON, anew after each section (- means "
        "stdout, at the end)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure the requested sections and print the table."""
    chosen = _chosen(args)
    megabytes = args.megabytes or (_QUICK_MEGABYTES if args.quick else _MEGABYTES)
    size_bytes = megabytes << 20
    place = Path(args.dir or tempfile.gettempdir())
    require_room(chosen, size_bytes, place)
    results = BenchResults(args.json, sections=chosen, size_mib=megabytes, repeat=args.repeat)
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    load_before = os.getloadavg()[0]
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=place) as directory:
            setup = BenchSetup(
                size_bytes=size_bytes,
                repeat=args.repeat,
                directory=Path(directory),
                lap=lambda: None,
                quick=args.quick,
                free_bytes=_free_memory(),
                minutes=args.minutes,
                store=args.store,
                server=args.server,
                lines=args.lines,
                width=args.width,
            )
            for name, found, seconds in measured(chosen, setup, console=Console(stderr=True)):
                results.add(name, found, seconds=seconds)
                if args.json != STDOUT:
                    _show(name, found, console=console)
                    sys.stdout.flush()
    finally:
        results.finish()
    if args.json == STDOUT:
        return 0
    console.print(
        f"{megabytes} MiB of state, medians (min–max) of {args.repeat}; {cores()} cores, "
        f"load average {load_before:.1f} before and {os.getloadavg()[0]:.1f} after"
        + ("" if kernel() is not None else "; without the compiled copy"),
        highlight=False,
    )
    return 0


def _chosen(args: argparse.Namespace) -> list[str]:
    """Return the sections to measure, in their order."""
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        raise ConfigError(
            f"no section {unknown[0]!r} to measure; choose from {', '.join(SECTIONS)}"
        )
    if args.engine is not None:
        if args.sections != ["rl"]:
            raise ConfigError(
                f"--engine {args.engine} is for one section: holdfast bench rl --engine "
                f"{args.engine}"
            )
        return [OF_ENGINES[args.engine]]
    left_out = {*OF_ENGINES.values(), *(() if args.store else NEED_STORE)}
    wanted = args.sections or [name for name in SECTIONS if name not in left_out]
    return [name for name in SECTIONS if name in wanted]


def _processes(text: str) -> tuple[int, ...]:
    """Parse numbers of processes that are there; an argparse type."""
    try:
        found = tuple(int(each) for each in text.split(","))
        for each in found:
            cpu_s(each)
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} does not name running processes; write numbers, as in 4711,4712"
        ) from error
    return found


def _limits(text: str) -> tuple[float, ...]:
    """Parse limits of lines in Mbit/s, 0 for none; an argparse type."""
    try:
        found = tuple(float(each) for each in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(each == 0 or _LEAST_MBIT <= each <= _MOST_MBIT for each in found):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give limits of {_LEAST_MBIT:g} to {_MOST_MBIT:g} Mbit/s, or 0 for none, as "
            "in 0,5,1"
        )
    return found


def _show(section: str, found: list[Result], *, console: Console) -> None:
    if rows := [row for row in found if isinstance(row, BenchRow)]:
        show(rows, console=console)
    if figures := [figure for figure in found if isinstance(figure, Figure)]:
        SECTIONS[section].show(figures, console=console)


def require_room(sections: Sequence[str], size_bytes: int, place: Path) -> None:
    """Raise ``StoreError`` or ``CapacityError`` if the sections need more room than there is."""
    disk = size_bytes * max(SECTIONS[name].disk for name in sections)
    shared = size_bytes * max(SECTIONS[name].shared for name in sections)
    memory = size_bytes * max(SECTIONS[name].memory for name in sections)
    if disk and (free := shutil.disk_usage(place).free) < disk + _SLACK_BYTES:
        raise StoreError(
            f"{place}: the benchmark needs {_megabytes(disk + _SLACK_BYTES)} and "
            f"{_megabytes(free)} are free; choose another directory with --dir, or a smaller "
            "--megabytes"
        )
    if shared and (free := shutil.disk_usage(ARENA_ROOT).free) < shared + _SLACK_BYTES:
        raise CapacityError(
            f"{ARENA_ROOT}: the benchmark needs {_megabytes(shared + _SLACK_BYTES)} of shared "
            f"memory and {_megabytes(free)} are free; choose a smaller --megabytes"
        )
    if (free := _free_memory()) < memory + _SLACK_BYTES:
        raise CapacityError(
            f"the benchmark needs {_megabytes(memory + _SLACK_BYTES)} of memory and "
            f"{_megabytes(free)} are free; choose a smaller --megabytes"
        )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB"


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return sys.maxsize
