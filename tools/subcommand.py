"""The interface of subcommands, the report of errors, and common types of arguments."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from typing import Protocol

from holdfast.tools.printing import printable


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


class HelpFormatter(argparse.HelpFormatter):
    """Wraps descriptions, and leaves texts of several lines, such as examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return super()._fill_text(text, width, indent)


def report(message: str) -> None:
    """Write ``message`` to stderr as one paragraph, wrapped if stderr is a terminal."""
    text = printable("error: " + " ".join(message.split()))
    if sys.stderr.isatty():
        width = min(shutil.get_terminal_size().columns, 100)
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    print(text, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """Parse a whole number of at least 1; an argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def positive_number(text: str) -> float:
    """Parse a finite number above 0; an argparse type."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return found
