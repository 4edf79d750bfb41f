"""Apply the settings of files and variables to the arguments of a command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any, Final

from holdfast.tools.printing import printable
from holdfast.tools.settings import keys, resolve, toml_file
from holdfast.tools.settings.configured import CONFIGURED, inner
from holdfast.tools.settings.resolve import COMMAND_LINE, Setting, SettingSources

_UNSET: Final = object()
_NAMED: Final = 8


def parse(
    parser: argparse.ArgumentParser, words: Sequence[str], commands: Collection[str]
) -> argparse.Namespace:
    """Parse a command line, and fill in the settings of the environment and of the file.

    ``commands`` are all that there are. Raises ``ConfigError`` for a wrong file or variable.
    """
    args = parser.parse_args(words)
    table, command = _table_of(parser, args)
    if not table:
        return args
    sources = SettingSources(file=toml_file.find(args.config, os.environ), environment=os.environ)
    if sources.file:
        resolve.check_tables(sources.file, commands)
    explicit = _explicit(parser, command, words)
    own = resolve.of_command(table, command, sources, explicit=explicit)
    for each in own:
        if each.is_given and each.origin != COMMAND_LINE and each.option:
            setattr(args, each.option.dest, each.value)
    script: list[Setting] = []
    if keys.starts_scripts(table):
        script = resolve.of_script(sources, explicit=explicit)
        given = [each for each in script if each.is_given and each.origin != COMMAND_LINE]
        setattr(args, keys.GIVEN, resolve.nested(given))
    if sources.file:
        _say_origin(sources.file.path, [*own, *script])
    return args


def _table_of(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[str, argparse.ArgumentParser]:
    """Return the table of the called command and its parser; an empty name if it has no table."""
    for table, words in CONFIGURED.items():
        below = parser
        for word in words:
            choices, dest = inner(below)
            if getattr(args, dest, None) != word or word not in choices:
                break
            below = choices[word]
        else:
            return table, below
    return "", parser


def _explicit(
    parser: argparse.ArgumentParser, command: argparse.ArgumentParser, words: Sequence[str]
) -> dict[str, Any]:
    """Return what the command line itself gives: it is parsed again, with nothing as default."""
    options = [action for action in command._actions if action.option_strings]
    before = [action.default for action in options]
    for action in options:
        appends = isinstance(action, argparse._AppendAction)
        action.default = None if appends else _UNSET
    try:
        found = vars(parser.parse_args(words))
    finally:
        for action, default in zip(options, before, strict=True):
            action.default = default
    return {
        action.dest: found[action.dest]
        for action in options
        if found.get(action.dest) is not None and found[action.dest] is not _UNSET
    }


def _say_origin(path: str, settings: Collection[Setting]) -> None:
    """Say which settings of a file count, so that none does so unseen."""
    names = [each.key for each in settings if f"{each.origin}:".startswith(f"{path}:")]
    if not names:
        return
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    text = f"holdfast: settings from {path}: {', '.join(names[:_NAMED])}{more}"
    print(printable(text), file=sys.stderr, flush=True)
