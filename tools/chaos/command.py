"""`holdfast chaos`: hurting a training job on purpose, and judging what that did to it."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Final, cast

from tools.terminal import HelpFormatter

if TYPE_CHECKING:
    from tools.cli import Subcommand, Subparsers

SUBCOMMANDS: Final = {
    "run": "tools.chaos.commands.run",
    "check": "tools.chaos.commands.check",
    "soak": "tools.chaos.commands.soak",
    "list": "tools.chaos.commands.scenarios",
    "faults": "tools.chaos.commands.faults",
    "report": "tools.chaos.report.command",
    "survive": "tools.chaos.survival",
}
"""Name → module, as in `tools.cli`."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "chaos",
        help="hurt a training job, and judge what that did to it",
        description="Hurts a job as a scenario says, and judges what that did to the training, not "
        "only whether it went on.",
        formatter_class=HelpFormatter,
    )
    inner = parser.add_subparsers(dest="chaos", metavar="COMMAND", required=True)
    for name in SUBCOMMANDS:
        _module(name).add_parser(cast("Subparsers", inner))
    return parser


def run(args: argparse.Namespace) -> int:
    """Do what the subcommand says."""
    return _module(args.chaos).run(args)


def _module(name: str) -> Subcommand:
    return cast("Subcommand", importlib.import_module(SUBCOMMANDS[name]))
