"""Output of text that comes from files: names, paths, values.

Anybody may have written the files. A terminal obeys some characters: it changes its title, clears
itself, or turns the direction of text. So all that a command prints passes `printable`: by `say`,
`report`, a `SafeConsole`, a log line, or as JSON.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Final

import msgspec

_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e]+")


def printable(text: str, *, lines: bool = False) -> str:
    """Return ``text`` with each character that does not print as its escape, as in ``\\x1b``.

    Lone surrogates and marks of direction are among those. ``lines``: line ends stay.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or (lines and each == "\n") else _escape(each) for each in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def say(text: str, *, stderr: bool = False) -> None:
    """Write one line, whatever its characters are."""
    print(printable(text), file=sys.stderr if stderr else sys.stdout, flush=stderr)


class _SafeLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)


def make_logs_printable() -> None:
    """Have warnings of the library, which name foreign files, reach the terminal `printable`."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_SafeLines())


def json_text(content: object) -> str:
    """Return the JSON of ``content``; in strings, what does not print is escaped."""
    text = msgspec.json.encode(content).decode()
    return text if text.isprintable() else _UNPRINTABLE.sub(_escape_in_json, text)


def _escape_in_json(found: re.Match[str]) -> str:
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in found[0])
