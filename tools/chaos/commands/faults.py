"""`holdfast chaos faults`: list all kinds of faults."""

from __future__ import annotations

import argparse
from typing import Final

import msgspec
from rich.table import Table

from holdfast.tools.chaos.commands import Add, Words
from holdfast.tools.chaos.scenarios.catalogue import CATALOGUE
from holdfast.tools.terminal import console, print_json

WORDS: Final = Words(
    help="show the kinds of faults",
    description="Shows every kind of fault: its effect, the parts it can hit (the first is the "
    "default), the meaning of its amount, and the worlds that have it.",
)


def declare(add: Add) -> None:
    """Declare the arguments."""
    add("--json", action="store_true", help="print the catalogue as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the kinds of faults."""
    if args.json:
        print_json({kind: msgspec.structs.asdict(info) for kind, info in CATALOGUE.items()})
        return 0
    table = Table("kind", "effect", "hits", "amount", "lasts", "worlds", box=None)
    for kind, info in sorted(CATALOGUE.items()):
        lasts = "yes" if info.lasts else ""
        table.add_row(
            kind, info.about, ", ".join(info.parts), info.amount, lasts, ", ".join(info.worlds)
        )
    console().print(table)
    return 0
