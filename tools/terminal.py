"""Helpers that all commands use: sizes, argument types, consoles, JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from holdfast.ckpt import sizes
from holdfast.tools.printing import json_text, printable

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


class SafeConsole(Console):
    """A console that prints foreign text as it is: no markup, no emoji codes, no control codes."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, stderr=stderr, width=width)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text to be measured and rendered for a string."""
        return super().render_str(printable(text, lines=True), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as rich does, with the text of each segment made `printable`."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text, lines=True), segment.style)


def console(*, stderr: bool = False) -> Console:
    """Return a console that is wide if no terminal limits it."""
    made = SafeConsole(stderr=stderr)
    return made if made.is_terminal else SafeConsole(stderr=stderr, width=_WIDTH)


def print_json(content: object) -> None:
    """Write ``content`` to stdout as one line of JSON, in characters that print."""
    sys.stdout.write(json_text(content) + "\n")
