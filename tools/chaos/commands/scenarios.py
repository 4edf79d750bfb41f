"""`holdfast chaos list`: the scenarios that come with Holdfast."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.table import Table

from tools.chaos.library import ready
from tools.chaos.scenario import load
from tools.terminal import HelpFormatter, console, print_json

if TYPE_CHECKING:
    from tools.cli import Subparsers


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "list",
        help="show the ready scenarios",
        description="Shows the scenarios that come with Holdfast: `holdfast chaos run NAME` runs "
        "one, and their files are examples for your own.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print names, files and texts as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Show them."""
    found = {name: (path, load(path)) for name, path in ready().items()}
    if args.json:
        print_json(
            [
                {"name": name, "file": str(path), "about": scenario.about}
                for name, (path, scenario) in found.items()
            ]
        )
        return 0
    table = Table("scenario", "what it shows", box=None, pad_edge=False)
    for name, (_, scenario) in found.items():
        table.add_row(name, " ".join(scenario.about.split()))
    console().print(table)
    return 0
