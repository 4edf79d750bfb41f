"""The pages of the command line, generated from its parsers."""

from __future__ import annotations

import argparse
import re

from holdfast.tools import cli


def pages() -> dict[str, str]:
    """Return path → text of the page of every subcommand, and of the page that lists them."""
    made = {}
    rows = []
    for name, (_, summary) in cli.COMMANDS.items():
        made[f"reference/cli/{name}.md"] = page(name)
        rows.append(f"| [`holdfast {name}`]({name}.md) | {_cell(summary)} |")
    top = cli.build_parser(None, None)
    made["reference/cli/index.md"] = "\n".join(
        [
            "# Command line",
            "",
            _prose(top.description),
            "",
            "| command | purpose |",
            "|---|---|",
            *rows,
            "",
            _prose(top.epilog),
            "",
        ]
    )
    return made


def page(name: str) -> str:
    """Return the page of the subcommand ``name``, with a section for each command inside it."""
    top = cli.build_parser(name, cli.load(name))
    parser = inner(top)[name]
    lines = [f"# `holdfast {name}`", "", *_section(parser)]
    for below, each in inner(parser).items():
        lines += [f"## `holdfast {name} {below}`", "", *_section(each)]
    return "\n".join(lines)


def inner(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's subcommands by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _section(parser: argparse.ArgumentParser) -> list[str]:
    lines = [_prose(parser.description), "", "```text", parser.format_usage().strip(), "```", ""]
    for group in parser._action_groups:
        shown = [
            action
            for action in group._group_actions
            if action.help != argparse.SUPPRESS
            and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
        ]
        if not shown:
            continue
        titled = group.title not in ("positional arguments", "options", None)
        lines += [*((f"**{group.title}**", "") if titled else ())]
        if titled and group.description:
            lines += [_prose(group.description), ""]
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| {_spelling(action)} | {_meaning(parser, action)} |" for action in shown]
        lines.append("")
    if parser.epilog:
        lines += [_prose(parser.epilog), ""]
    return lines


def _spelling(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else _metavar(action)
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{each} {value}`".replace(" `", "`") for each in action.option_strings)


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    if action.metavar:
        return action.metavar
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else action.dest


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    shown = parser._get_formatter()._expand_help(action) if action.help else ""
    return _cell(shown)


def _cell(text: str) -> str:
    """Return ``text`` for a table cell: on one line, with markup escaped."""
    return re.sub(r"([|<*_\[\]])", r"\\\1", " ".join(text.split()))


def _prose(text: str | None) -> str:
    """Return a description as Markdown; its indented lines, which are commands, become blocks."""
    made: list[str] = []
    inside = False
    for line in (text or "").strip("\n").splitlines():
        indented = line.startswith("  ") or (inside and not line.strip())
        if indented and not inside:
            made += ["", "```text"]
        if inside and not indented:
            made += ["```", ""]
        inside = indented
        made.append(line.removeprefix("  ") if inside else re.sub(r"([<*])", r"\\\1", line))
    if inside:
        made.append("```")
    return "\n".join(made).replace("\n\n```\n", "\n```\n")
