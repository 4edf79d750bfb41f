"""The interface between the command line and its subcommands, and how both report an error."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from typing import Protocol


class Subparsers(Protocol):
    """The part that subcommands use of the object from ``ArgumentParser.add_subparsers``."""

    def add_parser(self, name: str, **options: object) -> argparse.ArgumentParser:
        """Add and return the parser of one subcommand."""


class Subcommand(Protocol):
    """A module that implements one subcommand."""

    def add_parser(self, subparsers: Subparsers) -> argparse.ArgumentParser:
        """Declare the arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and return the exit code."""


def report(message: str) -> None:
    """Write ``message`` to stderr as one paragraph, wrapped if stderr is a terminal."""
    text = "error: " + " ".join(message.split())
    if sys.stderr.isatty():
        width = min(shutil.get_terminal_size().columns, 100)
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    print(text, file=sys.stderr, flush=True)
