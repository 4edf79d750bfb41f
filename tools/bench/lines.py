"""A table of a section's figures whose names are ``"line: column"``: a line for each first part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from holdfast.tools.bench.samples import Figure


def by_line(
    figures: Sequence[Figure],
    *,
    columns: Mapping[str, str],
    cell: Callable[[Figure], str],
) -> Table:
    """Return the table; ``columns`` maps what figures are called to titles, in their order.

    A figure that a line does not have is an empty cell.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in columns.values():
        table.add_column(title, justify="right", no_wrap=True)
    lines: dict[str, dict[str, Figure]] = {}
    for figure in figures:
        line, _, what = figure.name.partition(": ")
        lines.setdefault(line, {})[what] = figure
    for line, found in lines.items():
        table.add_row(line, *(cell(found[what]) if what in found else "" for what in columns))
    return table
