"""``holdfast settings``: each setting of a command, its value and its origin."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec
from rich.table import Table

from holdfast.elastic.errors import ConfigError
from holdfast.tools.settings import configured, resolve, toml_file
from holdfast.tools.settings.configured import CONFIGURED
from holdfast.tools.settings.keys import starts_scripts
from holdfast.tools.settings.resolve import Setting, SettingSources
from holdfast.tools.subcommand import HelpFormatter, Subparsers
from holdfast.tools.terminal import console, print_json

_EXAMPLES = """\
examples:
  holdfast settings                          values that a file or a variable gives, and from where
  holdfast settings run --all                every setting of `holdfast run`, defaults too
  holdfast settings --config cluster.toml    check a file: a wrong key is named with its line
  holdfast settings run --json | jq '.settings[] | select(.origin != "default")'
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "settings",
        help="show each setting, its value and its origin",
        description="Shows the values of settings and the origin of each: a line of holdfast.toml, "
        "a variable HOLDFAST_..., or a default. The whole file is checked. What the command line "
        "of a command gives counts more than all of these.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("table", nargs="?", metavar="COMMAND", help="show the settings of this command only")
    add("--all", action="store_true", help="show defaults, too")
    add("--json", action="store_true", help="print JSON")
    configured.declare(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Check the file and print the settings; 0 if it is right."""
    parser = args.whole()
    commands = configured.inner(parser)[0]
    tables = [name for name, words in CONFIGURED.items() if words[0] in commands]
    if args.table and args.table not in tables:
        raise ConfigError(f"{args.table}: no command with settings; give {', '.join(tables)}")
    file = toml_file.find(args.config, os.environ)
    sources = SettingSources(file=file, environment=os.environ)
    if file:
        resolve.check_tables(file, commands)
    found = [
        setting
        for table in tables
        for setting in resolve.of_command(
            table, configured.leaf(parser, CONFIGURED[table]), sources, explicit={}
        )
    ]
    found += resolve.of_script(sources, explicit={})
    shown = [each for each in found if (args.all or each.is_given) and _is_asked(each, args.table)]
    if args.json:
        print_json({"file": file.path if file else None, "settings": list(map(_record, shown))})
    else:
        _print(shown, file.path if file else "")
    return 0


def _is_asked(setting: Setting, table: str | None) -> bool:
    if table is None or setting.table == table:
        return True
    return starts_scripts(table) and setting.table not in CONFIGURED


def _record(setting: Setting) -> dict[str, object]:
    return {"key": setting.key, "value": _plain(setting.written), "origin": setting.origin}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else msgspec.to_builtins(value)


def _print(settings: list[Setting], path: str) -> None:
    if not settings:
        where = f"{path} has none" if path else f"there is no {configured.NAME} here"
        console().print(f"no setting is given: {where}, and no variable; --all shows the defaults")
        return
    table = Table("setting", "value", "origin", box=None, pad_edge=False)
    for each in settings:
        value = _plain(each.written)
        table.add_row(each.key, "" if value is None else str(value), each.origin)
    console().print(table)
