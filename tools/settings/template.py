"""The text of a first `holdfast.toml`: every key with default and meaning, commented out. Pure."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Mapping
from typing import Final

from holdfast.elastic.errors import ConfigError
from holdfast.tools.settings import keys, values

_HEAD: Final = """\
# Settings of Holdfast's commands. Remove the # in front of a key to set it; its default stands
# there. The command line counts more than a variable (HOLDFAST_RUN_NPROC=4), and that more than
# this file. `holdfast settings` checks the file and shows each value and its origin.
"""
_GROUPS: Final = {
    "snapshots": "holdfast.Snapshots(...) of the script: copies of the state in memory",
    "checkpoint": "holdfast.Checkpoints(...) of the script. With a root, every script writes them",
    "timeouts": "holdfast.Timeouts(...) of the script",
    "islands": "holdfast.Islands(...) of the script, for one that is an island",
    "rehearse": "a worker that joins rehearses first",
}
_WIDTH: Final = 98


def template(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the text for commands, by the names of their tables, and for scripts."""
    groups = keys.groups()
    plain = [name for name, fields in groups.items() if not fields]
    parts = [_HEAD, *(f"# {_GROUPS[name]}\n{_line(name, keys.default(name))}\n" for name in plain)]
    for table, parser in parsers.items():
        lines = [f"[{table}]  # options of `{parser.prog}`"]
        for key, action in keys.option_keys(table, parser).items():
            lines += ["", *_meaning(parser, action), _line(key, _value(action), _example(action))]
        parts.append("\n".join(lines) + "\n")
        if table == "run":
            parts += [_group(name, fields) for name, fields in groups.items() if fields]
    return "\n".join(parts)


def _group(name: str, fields: Iterable[str]) -> str:
    lines = [f"[{name}]  # {_GROUPS[name]}", ""]
    return "\n".join([*lines, *(_line(field, keys.default(name, field)) for field in fields), ""])


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    words = parser._get_formatter()._expand_help(action)
    return textwrap.wrap(
        words, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def _value(action: argparse.Action) -> object:
    """Return an option's default as a file has it; None if no text says it."""
    value = action.default
    if action.nargs == 0:
        return bool(value) and value == action.const
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return None
    try:
        values.of_option(action, value)
    except ConfigError:  # such as port 0, which stands for any
        return None
    return value


def _example(action: argparse.Action) -> str:
    words = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices:
        words = " or ".join(map(str, action.choices))
    return f"[{json.dumps(words)}]" if isinstance(action, argparse._AppendAction) else words


def _line(key: str, value: object, example: str = "") -> str:
    """Return a key with its value, commented out; ``example`` shows a value that it has not."""
    if value is None:
        return f"#{key} =" + (f"  # {example}" if example else "")
    return f"#{key} = {_toml(value)}"


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{}" if not value else json.dumps(dict(value))
    if isinstance(value, float):
        return f"{value:g}" if value % 1 or abs(value) > 1e15 else f"{value:.1f}"
    return json.dumps(value)
