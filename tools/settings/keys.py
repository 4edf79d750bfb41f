"""The keys of `holdfast.toml`: the options of commands, and the settings of scripts. Pure.

Neither is declared here. A table of a command has the options of its parser, by their long names
with underscores; a table of the script has the fields of a group of `holdfast.elastic.config`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, Final

from holdfast.elastic.config import OVERRIDABLE, Checkpoints, Settings
from holdfast.elastic.sea.settings import Islands

OPTIONS: Final = {
    "parity": ("snapshots", "parity"),
    "parity_group": ("snapshots", "group"),
    "memory": ("snapshots", "memory"),
    "disk": ("snapshots", "disk"),
    "checkpoint_bandwidth": ("checkpoint", "bandwidth"),
    "on_checkpoint_error": ("checkpoint", "on_error"),
    "stop_grace_s": ("timeouts", "stop_grace_s"),
    "island": ("islands", "name"),
    "sea": ("islands", "meet"),
    "sea_key": ("islands", "key"),
}
"""Destination of an option -> the group and the field of the script's settings that it sets."""

GIVEN: Final = "given_settings"
"""Name of the arguments' attribute with the settings of `holdfast.toml` and the environment."""

SECRET: Final = ("key_file", "etcd", "notice_header", "token", "token_file", "header", "sea_key")
"""Options that name a key, a secret or a program: no file may set them."""

NOT_SETTINGS: Final = ("help", "config", "module", "export", "bundle", "svg", *SECRET)
"""Options that no table has.

``module`` belongs to the script that the command line names; others write a file once.
"""

_STARTERS: Final = ("run", "ray")
"""Commands that start a script, and so take the settings of scripts."""

OWN_VARIABLES: Final = {
    ("run", "domain"): "HOLDFAST_DOMAIN",
    ("run", "preload"): "HOLDFAST_PRELOAD",
    ("sidecar", "domain"): "HOLDFAST_DOMAIN",
    ("sidecar", "run"): "HOLDFAST_RUN",
    ("sidecar", "node"): "HOLDFAST_NODE",
    ("sidecar", "file"): "HOLDFAST_SIDECAR",
}
"""Options whose command reads a variable by itself: the variable wins over the file."""

_SCRIPT: Final = Settings(checkpoint=Checkpoints("a script's own"), islands=Islands())
_UNSAID: Final = {"wait", "outer", "key"}
"""Fields of islands whose values are objects of Python, or that name a key."""


def variable(*words: str) -> str:
    """Return the environment variable of a key."""
    return "_".join(("HOLDFAST", *words)).upper()


def option_keys(table: str, parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the keys of a command's table, with the options that they set.

    Options of the script's settings are not among them: `groups` has those.
    """
    elsewhere = OPTIONS if starts_scripts(table) else ()
    found = {}
    for action in parser._actions:
        longest = max(action.option_strings, key=len, default="")
        key = longest.lstrip("-").replace("-", "_")
        is_shown = action.help != argparse.SUPPRESS
        if key and is_shown and key not in NOT_SETTINGS and action.dest not in elsewhere:
            found[key] = action
    return found


def starts_scripts(table: str) -> bool:
    """Return whether a command starts a script, and so takes the settings of one."""
    return table in _STARTERS


def groups() -> dict[str, tuple[str, ...]]:
    """Return the tables of the script's settings, with the fields of each.

    A setting outside of groups, such as ``rehearse``, has no fields.
    """
    found = {}
    for name in OVERRIDABLE:
        group = getattr(_SCRIPT, name)
        fields = dataclasses.fields(group) if dataclasses.is_dataclass(group) else ()
        found[name] = tuple(f.name for f in fields if f.name != "_" and f.name not in _UNSAID)
    return found


def default(table: str, field: str = "") -> Any:
    """Return the value that a setting has in a script that says nothing; None for what it needs."""
    if table == "checkpoint" and field == "root":
        return None
    group = getattr(_SCRIPT, table)
    return getattr(group, field) if field else group


def option_of(table: str, field: str) -> str:
    """Return the option of `holdfast run` for a setting of scripts; empty if there is none."""
    return next((name for name, at in OPTIONS.items() if at == (table, field)), "")


def nearest(found: str, known: Iterable[str]) -> str:
    """Return the remedy for a name that is not known: the most similar one, or all of them."""
    names = sorted(known)
    if similar := difflib.get_close_matches(found, names, n=1, cutoff=0.6):
        return f"write {similar[0]}"
    return f"there is {', '.join(names)}" if names else "remove it"
