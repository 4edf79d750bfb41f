"""`holdfast chaos report`: results of runs, for people and for CI."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from holdfast.tools.chaos.commands import Add, Words
from holdfast.tools.chaos.reading import read
from holdfast.tools.chaos.report.junit import to_junit
from holdfast.tools.chaos.report.page import figure, headline, render
from holdfast.tools.chaos.report.run import ReportedRun
from holdfast.tools.chaos.report.summary import RunsSummary, compare, summarise
from holdfast.tools.report.html import seconds
from holdfast.tools.terminal import console, place

FORMAT: Final = 2
"""Version of the JSON file; grows with every change that its readers must know."""

WORDS: Final = Words(
    help="report one run or many as text, HTML, JUnit XML or JSON",
    description="Reports the results of one run or many: promises kept and broken, the timeline, "
    "time to recover by fault and phase, goodput, lost machines, and the difference from other "
    "runs.",
    epilog="""\
examples:
  holdfast chaos report runs/kills --out report.html
  holdfast chaos report runs/today --against runs/yesterday --out report.html
  holdfast chaos report runs/today --junit chaos.xml --json chaos.json
  holdfast chaos report runs/plain/history --out report.html

A folder is one run, contains many runs, or is the history of any job. Exit codes: 0 the report was
made, 2 it could not be made. `holdfast chaos run` and `check` tell whether all checks passed.
""",
)


def declare(add: Add) -> None:
    """Declare the arguments."""
    add("folders", type=place, nargs="+", metavar="DIR", help="runs, folders of runs, or histories")
    add("--against", type=place, action="append", default=[], metavar="DIR", help="compare with")
    add("--out", type=Path, metavar="FILE", help="write an HTML page that needs no network")
    add(
        "--junit", type=Path, metavar="FILE", help="write JUnit XML with a test case for each check"
    )
    add("--json", type=Path, metavar="FILE", help="write all figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Read the runs, write the requested files, and print the figures."""
    runs = _read(args.folders)
    against = _read(args.against)
    if args.out:
        words = ["holdfast", "chaos", "report", *args.folders]
        words += [word for folder in args.against for word in ("--against", folder)]
        _write(args.out, render(runs, against=against, command=shlex.join(words)))
    if args.junit:
        _write(args.junit, to_junit(runs))
    if args.json:
        _write(args.json, to_json(runs, against=against))
    show(runs, against=against, console=console())
    return 0


def _read(folders: Sequence[str]) -> list[ReportedRun]:
    return [found for folder in folders for found in read(Path(folder))]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def to_json(runs: Sequence[ReportedRun], *, against: Sequence[ReportedRun] = ()) -> str:
    """Return all content of the page except the single steps, as JSON."""
    figures: dict[str, Any] = {
        "format": FORMAT,
        "summary": _plain(summarise(runs)),
        "runs": [_plain(msgspec.structs.replace(each, timeline=None)) for each in runs],
        "compared": _plain(compare(against, runs)) if against else None,
    }
    for each in figures["runs"]:
        del each["timeline"]
    return msgspec.json.format(msgspec.json.encode(figures), indent=2).decode() + "\n"


def _plain(value: object) -> Any:
    return msgspec.to_builtins(value, str_keys=True)


def show(runs: Sequence[ReportedRun], *, against: Sequence[ReportedRun], console: Console) -> None:
    """Print the headline, the violations, the recovery times, and the differences."""
    summary = summarise(runs)
    console.print(headline(summary), style="bold red" if summary.held < summary.runs else "bold")
    for each in runs:
        if not each.held:
            words = [f"{v.check}: {v.message}" for v in each.verdict.violations]
            console.print(f"  ✕ {each.label} ({each.folder})", style="red", markup=False)
            for word in [*words, *each.problems]:
                console.print(f"      {word}", style="red", markup=False)
    if summary.shares:
        console.print(f"goodput {summary.goodput:.1%}, from the first step to the last")
    if summary.repairs:
        console.print(_repairs(summary))
    if against:
        console.print(_differences(against, runs))


def _repairs(summary: RunsSummary) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("time to recover", no_wrap=True)
    for title in ("recoveries", "p50", "p95", "steps lost"):
        table.add_column(title, justify="right", no_wrap=True)
    for repair in summary.repairs:
        total = repair.total
        row = (repair.fault, str(repair.count), seconds(total.p50_s), seconds(total.p95_s))
        table.add_row(*row, str(repair.steps_lost))
    return table


def _differences(against: Sequence[ReportedRun], runs: Sequence[ReportedRun]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("compared", no_wrap=True)
    for title in ("before", "now"):
        table.add_column(title, justify="right", no_wrap=True)
    styles = {"after": "green", "before": "red"}
    for row in compare(against, runs):
        sides = figure(row.before, row.unit), figure(row.after, row.unit)
        table.add_row(row.name, *sides, style=styles.get(row.better))
    return table
