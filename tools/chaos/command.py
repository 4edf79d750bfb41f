"""`holdfast chaos`: inject faults into a training job and judge the effect on the training."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Final, cast

import msgspec

from holdfast.tools.subcommand import HelpFormatter, Subparsers

if TYPE_CHECKING:
    from holdfast.tools.chaos.commands import Command

SUBCOMMANDS: Final = {
    "run": "holdfast.tools.chaos.commands.run",
    "check": "holdfast.tools.chaos.commands.check",
    "soak": "holdfast.tools.chaos.commands.soak",
    "list": "holdfast.tools.chaos.commands.scenarios",
    "faults": "holdfast.tools.chaos.commands.faults",
    "report": "holdfast.tools.chaos.commands.report",
    "survive": "holdfast.tools.chaos.commands.survive",
}
"""Name → the module that implements this `Command`."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the commands and their arguments."""
    parser = subparsers.add_parser(
        "chaos",
        help="inject faults into a training job and check the training",
        description="Injects the faults of a scenario into a training job and checks the result: "
        "not only that the job goes on, but that it trains every sample once and reaches the "
        "same state.",
        formatter_class=HelpFormatter,
    )
    inner = parser.add_subparsers(dest="chaos", metavar="COMMAND", required=True)
    for name in SUBCOMMANDS:
        command = _module(name)
        words = msgspec.structs.asdict(command.WORDS)
        command.declare(inner.add_parser(name, **words, formatter_class=HelpFormatter).add_argument)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the chosen command."""
    return _module(args.chaos).run(args)


def _module(name: str) -> Command:
    return cast("Command", importlib.import_module(SUBCOMMANDS[name]))
