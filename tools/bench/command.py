"""`holdfast bench`: measure Holdfast beside the limits of this machine and other tools."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from holdfast.ckpt.errors import CapacityError, StoreError
from holdfast.ckpt.memory.arena import ARENA_ROOT
from holdfast.ckpt.native.streaming import kernel
from holdfast.elastic.errors import ConfigError
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Figure, Yardstick
from holdfast.tools.subcommand import Subparsers, positive, positive_number

Result: TypeAlias = BenchRow | Figure


class Section(NamedTuple):
    """The place of a section, and the most it needs at once, as multiples of the state's size.

    Shared memory counts as memory too. The module is imported when the section runs.
    """

    module: str
    function: str
    disk: int = 0
    shared: int = 0
    memory: int = 0


SECTIONS: Final = {
    "snapshot": Section(
        "holdfast.tools.bench.data_path.snapshot", "snapshot", disk=1, shared=3, memory=7
    ),
    "frozen": Section("holdfast.tools.bench.data_path.frozen", "frozen", shared=5, memory=8),
    "buffer": Section("holdfast.tools.bench.data_path.buffer", "buffer", shared=8, memory=9),
    "recover": Section("holdfast.tools.bench.data_path.recovery", "recover", shared=6, memory=12),
    "lost": Section(
        "holdfast.tools.bench.data_path.lost_time", "lost", disk=4, shared=7, memory=10
    ),
    "tuning": Section(
        "holdfast.tools.bench.data_path.tuning", "tuning", disk=4, shared=12, memory=12
    ),
    "persist": Section("holdfast.tools.bench.data_path.storage", "persist", disk=2, memory=4),
    "restore": Section("holdfast.tools.bench.data_path.storage", "restore", disk=6, memory=5),
    "reshard": Section("holdfast.tools.bench.data_path.storage", "reshard", disk=4, memory=3),
    "verify": Section("holdfast.tools.bench.data_path.storage", "verify", disk=2, memory=3),
    "mttr": Section("holdfast.tools.bench.faults.mttr", "mttr", disk=4, shared=7, memory=12),
    "resize": Section("holdfast.tools.bench.faults.resize", "resize", shared=7, memory=12),
    "goodput": Section("holdfast.tools.bench.faults.goodput", "goodput", shared=5, memory=10),
    "join": Section("holdfast.tools.bench.faults.joining", "join", shared=5, memory=12),
    "start": Section("holdfast.tools.bench.start", "start"),
    "rl": Section("holdfast.tools.bench.rl", "rl"),
    "plan": Section("holdfast.tools.bench.plan", "plan"),
    "control": Section("holdfast.tools.bench.control", "control"),
    "exact": Section("holdfast.tools.bench.exact.section", "exact", memory=8),
    "parity": Section("holdfast.tools.bench.data_path.codec", "parity", memory=6),
    "protect": Section("holdfast.tools.bench.data_path.protect", "protect", shared=6, memory=9),
    "memory": Section("holdfast.tools.bench.data_path.footprint", "memory", shared=18, memory=23),
    "store": Section("holdfast.tools.bench.data_path.object_store", "store", memory=4),
    "islands": Section("holdfast.tools.bench.islands.section", "islands"),
    "lines": Section("holdfast.tools.bench.islands.section", "lines"),
}

NEED_STORE: Final = ("store", "lines")
"""Sections that are left out where ``--store`` names no place."""

_SLACK_BYTES: Final = 64 << 20
_PLAIN_WIDTH: Final = 136
_MEGABYTES: Final = 512
_QUICK_MEGABYTES: Final = 32
_PACKAGES: Final = (
    "holdfast",
    "torch",
    "numpy",
    "zarr",
    "numcodecs",
    "pyeclib",
    "safetensors",
    "torchft",
)


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
        "--json",
        metavar="FILE",
        help="also write the figures and every sample as JSON (- means stdout)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure the requested sections and print the table."""
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        raise ConfigError(
            f"no section {unknown[0]!r} to measure; choose from {', '.join(SECTIONS)}"
        )
    default = [name for name in SECTIONS if name not in NEED_STORE or args.store]
    chosen = [name for name in SECTIONS if name in (args.sections or default)]
    megabytes = args.megabytes or (_QUICK_MEGABYTES if args.quick else _MEGABYTES)
    size_bytes = megabytes << 20
    place = Path(args.dir or tempfile.gettempdir())
    require_room(chosen, size_bytes, place)
    load_before = os.getloadavg()
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
        )
        found = _measured(chosen, setup)
    machine = _machine(load_before)
    if args.json:
        _write_json(args.json, found, megabytes=megabytes, repeat=args.repeat, machine=machine)
    if args.json == "-":
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    show([row for row in found if isinstance(row, BenchRow)], console=console)
    show_figures([figure for figure in found if isinstance(figure, Figure)], console=console)
    console.print(
        f"{megabytes} MiB of state, medians (min–max) of {args.repeat}; {machine['cores']} cores, "
        f"load average {load_before[0]:.1f} before and {machine['load_average'][1]:.1f} after"
        + ("" if machine["compiled_copy"] else "; without the compiled copy"),
        highlight=False,
    )
    return 0


def _write_json(
    target: str, results: Sequence[Result], *, megabytes: int, repeat: int, machine: dict[str, Any]
) -> None:
    found = {
        "figures": [figure for result in results for figure in result.figures()],
        "machine": machine,
        "versions": _versions(),
        "megabytes": megabytes,
        "repeat": repeat,
    }
    text = msgspec.json.encode(found).decode() + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


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


def _measured(sections: Sequence[str], setup: BenchSetup) -> list[Result]:
    results: list[Result] = []
    console = Console(stderr=True)
    with (
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as bar,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        task = bar.add_task("", total=len(sections) * (setup.repeat + 1))
        for name in sections:
            bar.update(task, description=name)

            def say(text: str, *, name: str = name) -> None:
                bar.update(task, description=f"{name}: {text}")

            reporting = dataclasses.replace(setup, lap=lambda: bar.advance(task), say=say)
            results += _section(name)(reporting)
    return results


def _section(name: str) -> Callable[[BenchSetup], list[Result]]:
    section = SECTIONS[name]
    found = getattr(importlib.import_module(section.module), section.function)
    return cast("Callable[[BenchSetup], list[Result]]", found)


def _machine(load_before: tuple[float, float, float]) -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load_before[0], 2), round(os.getloadavg()[0], 2)],
        "system": platform.platform(),
        "processor": _processor(),
        "compiled_copy": kernel() is not None,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def show(rows: Sequence[BenchRow], *, console: Console) -> None:
    """Print the rows as a table for people."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("min–max", justify="right", no_wrap=True)
    table.add_column("GB/s", justify="right", no_wrap=True)
    table.add_column("beside", overflow="fold")
    table.add_column("its time", justify="right", no_wrap=True)
    table.add_column("×", justify="right", no_wrap=True)
    section = ""
    for row in rows:
        if row.section != section:
            table.add_row(f"[bold]{row.section}[/bold]")
            section = row.section
        first, *others = row.beside
        table.add_row(
            f"  {row.name}" + (" (once)" if len(row.samples_s) == 1 else ""),
            readable(row.seconds),
            f"{readable(min(row.samples_s))}–{readable(max(row.samples_s))}",
            f"{row.gigabytes_per_s:.2f}" if row.size_bytes else "",
            *_beside(row, first),
        )
        for other in others:
            table.add_row("", "", "", "", *_beside(row, other))
        for note in row.notes:
            table.add_row(f"    {note}")
    console.print(table)


def show_figures(figures: Sequence[Figure], *, console: Console) -> None:
    """Print the sections that have their own tables, each with its module's ``show``."""
    for name in dict.fromkeys(figure.section for figure in figures):
        module = importlib.import_module(SECTIONS[name].module)
        module.show([each for each in figures if each.section == name], console=console)


def _beside(row: BenchRow, other: Yardstick) -> tuple[str, str, str]:
    return (other.name, readable(other.seconds), f"{row.ratio(other):.2f}")


def readable(seconds: float) -> str:
    """Return a time in milliseconds, or in seconds if it is long."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
