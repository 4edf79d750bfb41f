"""Helpers that all commands use: sizes, argument types, consoles, progress bars, JSON."""

from __future__ import annotations

import argparse
import sys
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.ckpt import sizes

_WIDTH: Final = 160
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def readable(nbytes: float) -> str:
    """Return a size in the unit that fits it."""
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"


def parse_bytes(text: str) -> int:
    """Parse a size such as ``2GiB``, ``512M`` (both binary), ``1.5GB`` (decimal) or ``4096``.

    An argparse type: raises ``ArgumentTypeError`` for anything else, and for less than one byte.
    """
    try:
        return sizes.parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def step_number(text: str) -> int:
    """Parse the number of a step; an argparse type."""
    if not text.isdecimal() or len(text) > 12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step number, as in 200")
    return int(text)


def place(text: str) -> str:
    """Accept a path or an address; an argparse type.

    Raises ``ArgumentTypeError`` for the empty string, which would mean the working directory.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty; is a variable of the shell not set?")
    return text


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as text for people."""
    return " x ".join(map(str, shape)) or "scalar"


def console(*, stderr: bool = False) -> Console:
    """Return a console that is wide if no terminal limits it."""
    made = Console(highlight=False, stderr=stderr)
    return made if made.is_terminal else Console(highlight=False, stderr=stderr, width=_WIDTH)


def progress_bar() -> Progress:
    """Return a progress bar for bytes, to be entered as a context.

    It shows on stderr, only on a terminal, and disappears at the end. Call ``task =
    bar.add_task("reading", total=nbytes)``, then ``bar.advance(task, nbytes)`` from any thread.
    """
    shown = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=shown,
        transient=True,
        disable=not shown.is_terminal,
    )


def print_json(content: object) -> None:
    """Write ``content`` to stdout as one line of JSON."""
    sys.stdout.write(msgspec.json.encode(content).decode() + "\n")
