"""The table of a section's rows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from holdfast.tools.bench.samples import BenchRow, Yardstick


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


def _beside(row: BenchRow, other: Yardstick) -> tuple[str, str, str]:
    return (other.name, readable(other.seconds), f"{row.ratio(other):.2f}")


def readable(seconds: float) -> str:
    """Return a time in milliseconds, or in seconds if it is long."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
