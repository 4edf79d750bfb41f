"""`holdfast chaos list`: the scenarios that come with Holdfast."""

from __future__ import annotations

import argparse
from typing import Final

from rich.table import Table

from holdfast.tools.chaos.commands import Add, Words
from holdfast.tools.chaos.library import load, ready
from holdfast.tools.terminal import console, print_json

WORDS: Final = Words(
    help="show the included scenarios",
    description="Shows the scenarios that come with Holdfast: `holdfast chaos run NAME` runs "
    "one, and their files are examples for your own.",
)


def declare(add: Add) -> None:
    """Declare the arguments."""
    add("--json", action="store_true", help="print names, files and texts as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the scenarios."""
    found = {name: (path, load(path)) for name, path in ready().items()}
    if args.json:
        print_json(
            [
                {"name": name, "file": str(path), "about": scenario.about}
                for name, (path, scenario) in found.items()
            ]
        )
        return 0
    table = Table("scenario", "purpose", box=None, pad_edge=False)
    for name, (_, scenario) in found.items():
        table.add_row(name, " ".join(scenario.about.split()))
    console().print(table)
    return 0
