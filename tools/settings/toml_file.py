"""A file of settings: where it is, whether it may be trusted, its content, and lines in it."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.elastic.errors import ConfigError
from holdfast.tools.settings.configured import CONFIG_ENV, NAME
from holdfast.tools.settings.resolve import has

_OTHERS_WRITE: Final = 0o022
_MOST_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """The parsed content of a file of settings, and its text for the lines of keys."""

    path: str
    content: Mapping[str, Any]
    text: str = ""

    def line(self, *key: str) -> int:
        """Return the line at which a key or the first key of a table begins, 0 if there is none.

        The parser tells no lines. The lines up to some number are a document too, or they end
        within a value: so the key begins after the last document that lacks it.
        """
        lines = self.text.splitlines(keepends=True)
        without = 0
        for number in range(1, len(lines) + 1):
            try:
                part = tomllib.loads("".join(lines[:number]))
            except tomllib.TOMLDecodeError:
                continue
            if has(part, key):
                return without + 1
            without = number
        return 0

    def at(self, *key: str) -> str:
        """Return file, line and key for a message."""
        line = self.line(*key)
        return f"{self.path}{f':{line}' if line else ''}: {'.'.join(key)}"


def find(given: str | None, environment: Mapping[str, str]) -> SettingsFile | None:
    """Return the file of settings: the given one, that of the environment, or the directory's.

    Only the working directory is looked at, none above it. A file that was found there must belong
    to this user, and nobody else may be able to write to it, for it decides where a job's
    checkpoints go. Raises ``ConfigError`` for one that others can change, that is missing although
    it was named, or that is no TOML.
    """
    if named := given or environment.get(CONFIG_ENV):
        return read(Path(named), shown=named)
    path = Path(NAME)
    if not path.is_file():
        return None
    _check_owner(path)
    return read(path, shown=f"./{NAME}")


def _check_owner(path: Path) -> None:
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"./{path} belongs to user {found.st_uid}: it is not read unless you name it; look at "
            f"it, then give --config {path}, or --config /dev/null to do without"
        )
    if found.st_mode & _OTHERS_WRITE:
        raise ConfigError(
            f"./{path}: others can write to it (mode {stat.S_IMODE(found.st_mode):04o}): chmod "
            f"go-w {path}, or give --config {path}, or --config /dev/null to do without"
        )


def read(path: Path, *, shown: str) -> SettingsFile:
    """Return the content of a file. Raises ``ConfigError`` with the line of a fault."""
    try:
        with path.open("rb") as opened:
            raw = opened.read(_MOST_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise ConfigError(
            f"{shown}: {error.strerror}; give a file of settings with --config or {CONFIG_ENV} "
            "(`holdfast init` writes one)"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}: no text in UTF-8; save it as UTF-8") from error
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"{shown}: longer than {_MOST_BYTES} bytes; name a file of settings")
    try:
        return SettingsFile(path=shown, content=tomllib.loads(text), text=text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{shown}: {error}; write KEY = VALUE, with texts in quotes") from error
