"""The commands that have settings, and the option that names their file; quick to import."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Final

NAME: Final = "holdfast.toml"
CONFIG_ENV: Final = "HOLDFAST_CONFIG"

CONFIGURED: Final[Mapping[str, tuple[str, ...]]] = {
    "run": ("run",),
    "ray": ("ray", "submit"),
    "sidecar": ("sidecar",),
    "status": ("status",),
    "check": ("check",),
    "plan": ("plan",),
    "dashboard": ("dashboard",),
    "top": ("top",),
    "metrics": ("metrics",),
    "logs": ("logs",),
    "doctor": ("doctor",),
}
"""Table of a command -> the words that call it.

Commands that write, change or remove checkpoints take all they need on the command line.
"""


def add_option(command: str, parser: argparse.ArgumentParser) -> None:
    """Declare ``--config``, if the command has settings."""
    for words in CONFIGURED.values():
        if words[0] == command:
            declare(leaf(parser, words[1:]))


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare ``--config``."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"file of settings (default: {CONFIG_ENV}, else {NAME} in the working directory; "
        "/dev/null: none)",
    )


def leaf(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> argparse.ArgumentParser:
    """Return the parser that ``words`` call, below another."""
    for word in words:
        parser = inner(parser)[0][word]
    return parser


def inner(parser: argparse.ArgumentParser) -> tuple[dict[str, argparse.ArgumentParser], str]:
    """Return the parsers of a parser's commands by name, and the destination of the name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices), action.dest
    return {}, ""
