"""`holdfast bench`: how fast it is here, beside what the machine allows and what others do."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ckpt.arena import ARENA_ROOT
from ckpt.errors import CapacityError, StoreError
from tools.benching.samples import Row, Setup

if TYPE_CHECKING:
    from tools.cli import Subparsers

SECTIONS: Final = {
    "snapshot": ("tools.benching.memory", "snapshot"),
    "restore": ("tools.benching.memory", "memory_restore"),
    "save": ("tools.benching.storage", "save"),
    "load": ("tools.benching.storage", "load"),
    "parity": ("tools.benching.codec", "parity"),
    "protect": ("tools.benching.protect", "protect"),
}
"""Section -> (module, function). The module is imported when the section runs: some need torch."""

_DISK_TIMES: Final = {"snapshot": 1, "restore": 0, "save": 1, "load": 3, "parity": 0, "protect": 0}
_SHARED_TIMES: Final = {
    "snapshot": 3,
    "restore": 4,
    "save": 0,
    "load": 0,
    "parity": 0,
    "protect": 3,
}
_MEMORY_TIMES: Final = {
    "snapshot": 7,
    "restore": 8,
    "save": 3,
    "load": 4,
    "parity": 6,
    "protect": 6,
}
"""Section -> the most it needs at once, in times the state; shared memory is part of memory."""

_SLACK_BYTES: Final = 64 << 20
_PLAIN_WIDTH: Final = 120


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "bench",
        help="measure snapshots, checkpoints and parity on this machine",
        description="Times Holdfast's data path in turn with a physical reference (memcpy, a plain "
        "file, a plain connection) and with what others offer (DCP is torch.distributed.checkpoint)"
        ", and shows medians. Times as multiples: below 1 is faster than the other.",
    )
    parser.add_argument(
        "--megabytes", type=_positive, default=256, metavar="M", help="size of the state (256)"
    )
    parser.add_argument(
        "--repeat", type=_positive, default=5, metavar="N", help="rounds after the warm-up (5)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="where to write; emptied afterwards (default: the directory for temporary files)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, every sample in it")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Measure the sections asked for and print the table."""
    chosen = [name for name in SECTIONS if args.only is None or name in args.only]
    size_bytes = args.megabytes << 20
    place = Path(args.dir or tempfile.gettempdir())
    require_room(chosen, size_bytes, place)
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=place) as directory:
        rows = _measured(chosen, size_bytes, args.repeat, Path(directory))
    machine = _machine(load_before)
    if args.json:
        found = {
            "megabytes": args.megabytes,
            "repeat": args.repeat,
            "machine": machine,
            "rows": [row.described() for row in rows],
        }
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    show(rows, console=console)
    console.print(
        f"{args.megabytes} MiB of state, medians of {args.repeat}; {machine['cores']} cores, "
        f"load average {load_before[0]:.1f} before and {machine['load_average'][1]:.1f} after",
        highlight=False,
    )
    return 0


def require_room(sections: Sequence[str], size_bytes: int, place: Path) -> None:
    """Raise ``StoreError`` or ``CapacityError`` where the sections would not find room."""
    disk = size_bytes * max(_DISK_TIMES[name] for name in sections)
    shared = size_bytes * max(_SHARED_TIMES[name] for name in sections)
    memory = size_bytes * max(_MEMORY_TIMES[name] for name in sections)
    if disk and (free := shutil.disk_usage(place).free) < disk + _SLACK_BYTES:
        raise StoreError(
            f"{place}: {_megabytes(disk + _SLACK_BYTES)} are needed and {_megabytes(free)} are "
            "free; choose another place with --dir, or fewer --megabytes"
        )
    if shared and (free := shutil.disk_usage(ARENA_ROOT).free) < shared + _SLACK_BYTES:
        raise CapacityError(
            f"{ARENA_ROOT}: {_megabytes(shared + _SLACK_BYTES)} of shared memory are needed and "
            f"{_megabytes(free)} are free; take fewer --megabytes"
        )
    if (free := _free_memory()) < memory + _SLACK_BYTES:
        raise CapacityError(
            f"{_megabytes(memory + _SLACK_BYTES)} of memory are needed and {_megabytes(free)} are "
            "free; take fewer --megabytes"
        )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB"


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return sys.maxsize


def _measured(sections: Sequence[str], size_bytes: int, repeat: int, directory: Path) -> list[Row]:
    rows: list[Row] = []
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
        task = bar.add_task("", total=len(sections) * (repeat + 1))
        setup = Setup(
            size_bytes=size_bytes,
            repeat=repeat,
            directory=directory,
            lap=lambda: bar.advance(task),
        )
        for name in sections:
            bar.update(task, description=name)
            rows += _section(name)(setup)
    return rows


def _section(name: str) -> Callable[[Setup], list[Row]]:
    module, function = SECTIONS[name]
    return cast("Callable[[Setup], list[Row]]", getattr(importlib.import_module(module), function))


def _machine(load_before: tuple[float, float, float]) -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load_before[0], 2), round(os.getloadavg()[0], 2)],
        "python": sys.version.split()[0],
        "torch": importlib.metadata.version("torch"),
    }


def show(rows: Sequence[Row], *, console: Console) -> None:
    """Print the rows for people."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in ("time", "GB/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("reference", "peer"):
        table.add_column(title)
        table.add_column("its time", justify="right", no_wrap=True)
        table.add_column("×", justify="right", no_wrap=True)
    section = ""
    for row in rows:
        if row.section != section:
            table.add_row(f"[bold]{row.section}[/bold]")
            section = row.section
        reference, peer = row.reference, row.peer
        table.add_row(
            f"  {row.name}" + (" (once)" if len(row.samples_s) == 1 else ""),
            readable(row.seconds),
            f"{row.gigabytes_per_s:.2f}",
            reference.name,
            readable(reference.seconds),
            f"{row.of_reference:.2f}",
            peer.name if peer else "",
            readable(peer.seconds) if peer else "",
            f"{row.of_peer:.2f}" if row.of_peer is not None else "",
        )
    console.print(table)


def readable(seconds: float) -> str:
    """Return a time in milliseconds, or in seconds where it is long."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
