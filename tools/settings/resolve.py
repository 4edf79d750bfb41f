"""The settings of one command: the command line before the environment before the file. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from holdfast.elastic.errors import ConfigError
from holdfast.tools.settings import keys, values
from holdfast.tools.settings.configured import CONFIGURED

COMMAND_LINE: Final = "the command line"
BUILT_IN: Final = "default"
SCRIPT: Final = "default, unless the script has another"


class ParsedFile(Protocol):
    """The part that resolving uses of a file of settings."""

    @property
    def path(self) -> str:
        """The file's name for messages."""

    @property
    def content(self) -> Mapping[str, Any]:
        """The parsed tables."""

    def line(self, *key: str) -> int:
        """Return the line of a key, 0 if there is none."""

    def at(self, *key: str) -> str:
        """Return file, line and key for a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value of a key and its origin: a file and line, a variable, the command line, a default.

    ``written`` is the value as the file or the variable has it. ``option`` is the option of a
    command; None for a setting of the script.
    """

    table: str
    field: str
    value: Any
    origin: str
    written: Any
    option: argparse.Action | None = None

    @property
    def key(self) -> str:
        """The key as a file has it."""
        return ".".join(filter(None, (self.table, self.field)))

    @property
    def is_given(self) -> bool:
        """True if a file, a variable or the command line gave the value."""
        return self.origin not in (BUILT_IN, SCRIPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSources:
    """The places of settings: a file, if there is one, and the environment."""

    file: ParsedFile | None
    environment: Mapping[str, str]

    def origin(self, *key: str) -> str:
        """Return the origin of a value of the file."""
        assert self.file is not None
        line = self.file.line(*key)
        return f"{self.file.path}{f':{line}' if line else ''}"


def check_tables(file: ParsedFile, commands: Collection[str]) -> None:
    """Raise ``ConfigError`` for a table or a key at the top that is none of Holdfast's."""
    known = {name for name, words in CONFIGURED.items() if words[0] in commands}
    known |= keys.groups().keys()
    for table, content in file.content.items():
        if table not in known:
            raise ConfigError(
                f"{file.at(table)}: there is no such table; {keys.nearest(table, known)}"
            )
        plain = table in keys.groups() and not keys.groups()[table]
        if not plain and not isinstance(content, Mapping):
            raise ConfigError(
                f"{file.at(table)}: a table is needed; write [{table}] above its keys"
            )


def of_command(
    table: str,
    parser: argparse.ArgumentParser,
    sources: SettingSources,
    *,
    explicit: Mapping[str, Any],
) -> list[Setting]:
    """Return the settings of a command's own table, in the order of its options.

    ``explicit`` has the values of the command line by destination. An option of which the command
    line gives an alternative (``--json`` for ``--prometheus``) is left at its default. Raises
    ``ConfigError`` for an unknown key and a wrong value.
    """
    known = keys.option_keys(table, parser)
    in_file = sources.file.content.get(table, {}) if sources.file else {}
    _check_keys(table, in_file, known, sources.file)
    silenced = _alternatives(parser, explicit)
    found = []
    for key, action in known.items():
        if action.dest in explicit:
            value = explicit[action.dest]
            found.append(_option(table, key, action, value, COMMAND_LINE, value))
        elif action.dest in silenced:
            found.append(_option(table, key, action, action.default, BUILT_IN, action.default))
        else:
            found.append(_given(table, key, action, sources))
    return found


def _option(
    table: str, key: str, action: argparse.Action, value: object, origin: str, written: object
) -> Setting:
    return Setting(
        table=table, field=key, value=value, origin=origin, written=written, option=action
    )


def _given(table: str, key: str, action: argparse.Action, sources: SettingSources) -> Setting:
    name = keys.variable(table, key)
    if text := sources.environment.get(name):
        try:
            value = values.of_environment(action, text)
        except ConfigError as error:
            raise ConfigError(f"{name}={error}") from error
        return _option(table, key, action, value, name, text)
    own = keys.OWN_VARIABLES.get((table, key), "")
    if text := sources.environment.get(own):
        return _option(table, key, action, action.default, own, text)
    file = sources.file
    if file is None or key not in file.content.get(table, {}):
        return _option(table, key, action, action.default, BUILT_IN, action.default)
    written = file.content[table][key]
    try:
        value = values.of_option(action, written)
    except ConfigError as error:
        raise ConfigError(f"{file.at(table, key)} = {error}") from error
    return _option(table, key, action, value, sources.origin(table, key), written)


def _alternatives(parser: argparse.ArgumentParser, explicit: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for group in parser._mutually_exclusive_groups:
        members = {action.dest for action in group._group_actions}
        if members & explicit.keys():
            found |= members
    return found


def _check_keys(
    table: str, content: Mapping[str, Any], known: Collection[str], file: ParsedFile | None
) -> None:
    for key in content:
        if key in known:
            continue
        assert file is not None
        place = file.at(table, key)
        option = key.replace("_", "-")
        if key in keys.SECRET:
            raise ConfigError(
                f"{place}: a file of settings names no key, secret or program: anybody may have "
                f"written it; give --{option} on the command line"
            )
        if keys.starts_scripts(table) and key in keys.OPTIONS:
            group, field = keys.OPTIONS[key]
            raise ConfigError(
                f"{place}: it is a setting of the script; write {field} below [{group}]"
            )
        elsewhere = [f"[{name}]" for name, fields in keys.groups().items() if key in fields]
        if elsewhere and not _is_like(key, known):
            raise ConfigError(f"{place}: there is no such key; write it below {elsewhere[0]}")
        raise ConfigError(f"{place}: there is no such key; {keys.nearest(key, known)}")


def _is_like(key: str, known: Collection[str]) -> bool:
    return keys.nearest(key, known).startswith("write ")


def of_script(sources: SettingSources, *, explicit: Mapping[str, Any]) -> list[Setting]:
    """Return the settings of scripts; a value that nothing gives is the script's own.

    Raises ``ConfigError`` for an unknown key, a wrong value and values that contradict each other.
    """
    found = []
    for table, fields in keys.groups().items():
        content = sources.file.content.get(table, {}) if sources.file else {}
        if fields:
            _check_keys(table, content, fields, sources.file)
        found += [_of_field(table, field, sources, explicit) for field in fields or ("",)]
    file = [each for each in found if each.origin not in (BUILT_IN, SCRIPT, COMMAND_LINE)]
    try:
        values.check_together(nested(file))
    except ConfigError as error:
        names = ", ".join(f"{each.key} ({each.origin})" for each in file)
        raise ConfigError(f"{names}: {error}") from error
    return found


def _of_field(
    table: str, field: str, sources: SettingSources, explicit: Mapping[str, Any]
) -> Setting:
    path = (table, field) if field else (table,)
    value: Any = explicit.get(keys.option_of(table, field))
    if value is not None:
        return _setting(path, value, COMMAND_LINE)
    name = keys.variable(*path)
    if text := sources.environment.get(name):
        return _setting(path, _checked_text(table, field, text, name), name)
    file = sources.file
    if file is None or not has(file.content, path):
        return _setting(path, keys.default(table, field), SCRIPT)
    value = file.content[table][field] if field else file.content[table]
    try:
        values.check_setting(table, field, value)
    except ConfigError as error:
        raise ConfigError(f"{file.at(*path)}: {error}") from error
    return _setting(path, value, sources.origin(*path))


def _setting(path: tuple[str, ...], value: object, origin: str) -> Setting:
    table, field = (*path, "")[:2]
    return Setting(table=table, field=field, value=value, origin=origin, written=value)


def has(content: Mapping[str, Any], key: Sequence[str]) -> bool:
    """Return whether nested tables have a key."""
    found: Any = content
    for word in key:
        if not isinstance(found, Mapping) or word not in found:
            return False
        found = found[word]
    return True


def _checked_text(table: str, field: str, text: str, name: str) -> object:
    """Return the value of a variable: of a number's type if that fits, else the text itself."""
    value = values.typed(text)
    try:
        values.check_setting(table, field, value)
    except ConfigError as error:
        if value == text:
            raise ConfigError(f"{name}: {error}") from error
    else:
        return value
    try:
        values.check_setting(table, field, text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    return text


def nested(settings: Collection[Setting]) -> dict[str, Any]:
    """Return settings of scripts as `Settings.overridden` takes them."""
    found: dict[str, Any] = {}
    for each in settings:
        if each.field:
            found.setdefault(each.table, {})[each.field] = each.value
        else:
            found[each.table] = each.value
    return found
