"""Values of a file or of the environment, checked as those of the command line are. Pure."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Mapping
from typing import Any

from holdfast.elastic.config import Checkpoints, Settings
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.sea.settings import Islands


def of_option(action: argparse.Action, value: object) -> object:
    """Return an option's value as its parser would make it. Raises ``ConfigError``."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{value!r}: give true or false")
        const = action.const if action.const is not None else True
        return const if value else action.default
    several = isinstance(action, argparse._AppendAction) or action.nargs in ("*", "+")
    counted = isinstance(action.nargs, int)
    if several or counted:
        each = value if isinstance(value, list) else [value]
        if counted and len(each) != action.nargs:
            raise ConfigError(f"{value!r}: give a list of {action.nargs} values")
        return [_one(action, item) for item in each]
    return _one(action, value)


def _one(action: argparse.Action, value: object) -> object:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ConfigError(f"{value!r}: give {_wanted(action)}")
    kind: Any = action.type or str
    try:
        made = kind(str(value))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{value!r}: give {_wanted(action)}") from error
    if action.choices is not None and made not in action.choices:
        raise ConfigError(f"{value!r}: give {' or '.join(map(repr, action.choices))}")
    return made


def _wanted(action: argparse.Action) -> str:
    kinds = {int: "a whole number", float: "a number"}
    return kinds.get(action.type, f"a value as for {action.option_strings[-1]}")  # type: ignore[call-overload,no-any-return]


def of_environment(action: argparse.Action, text: str) -> object:
    """Return an option's value by the text of a variable. Raises ``ConfigError``."""
    if action.nargs == 0:
        known = {"1": True, "true": True, "0": False, "false": False}
        if text.lower() not in known:
            raise ConfigError(f"{text!r}: give 1 or 0")
        return of_option(action, known[text.lower()])
    several = isinstance(action, argparse._AppendAction) or action.nargs is not None
    return of_option(action, text.split(",") if several else text)


def typed(text: str) -> object:
    """Return the text of a variable as a value of TOML: a number, true, false; else the text."""
    try:
        found = tomllib.loads(f"it = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["it"] if len(found) == 1 else text


def check_setting(table: str, field: str, value: object) -> None:
    """Raise ``ConfigError`` for a value that a field of the script's settings refuses."""
    script = Settings(checkpoint=Checkpoints("a script's own"), islands=Islands())
    if not field:
        dataclasses.replace(script, **{table: value})  # type: ignore[arg-type]
        return
    group = getattr(script, table)
    if table == "snapshots":  # a group has more nodes than its parity, by whichever key
        _check_snapshots(group, field, value)
    else:
        dataclasses.replace(group, **{field: value})


def _check_snapshots(group: Any, field: str, value: object) -> None:
    room = {"group": 1 << 20} if field == "parity" else {"parity": 0}
    dataclasses.replace(group, **{**room, field: value})


def check_together(found: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for settings that contradict each other."""
    Settings(checkpoint=Checkpoints("a script's own"), islands=Islands()).overridden(found)
