"""The names of preloaded modules, and the Python program that a worker's command runs. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.elastic.errors import ConfigError

PRELOAD_ENV: Final = "HOLDFAST_PRELOAD"
"""Environment variable with the default of ``holdfast run --preload``."""

_NAME: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class WorkerProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A script, or a module if ``is_module``, with its arguments.

    ``unbuffered`` says that the interpreter has the option ``-u``.
    """

    name: str
    is_module: bool
    args: tuple[str, ...]
    unbuffered: bool = False


def module_names(text: str, *, option: str = "--preload") -> tuple[str, ...]:
    """Return the names in ``text``, separated by commas; raises ``ConfigError``."""
    names = tuple(part for each in text.split(",") if (part := each.strip()))
    check_names(names, option=option)
    return names


def check_names(names: Sequence[str], *, option: str = "preload") -> None:
    """Raise ``ConfigError`` unless each is the dotted name of a module."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{option} has {name!r}, which is no module's name: give names separated by "
                "commas, as in torch,transformers"
            )


def program_of(command: Sequence[str], *, interpreter: str) -> WorkerProgram:
    """Return the program of ``INTERPRETER [-u] SCRIPT ...`` or ``INTERPRETER [-u] -m MODULE ...``.

    Raises ``ConfigError`` for any other command: it cannot be forked from a process that runs this
    interpreter.
    """
    first, *words = command or ("",)
    unbuffered = words[:1] == ["-u"]
    if first == interpreter:
        match words[unbuffered:]:
            case ["-m", name, *args]:
                return WorkerProgram(
                    name=name, is_module=True, args=tuple(args), unbuffered=unbuffered
                )
            case [name, *args] if not name.startswith("-"):
                return WorkerProgram(
                    name=name, is_module=False, args=tuple(args), unbuffered=unbuffered
                )
    raise ConfigError(
        f"preload needs workers that run Python as {interpreter} [-u] SCRIPT or [-u] -m MODULE, "
        f"not {' '.join(command)!r}: change the command, or leave preload out"
    )
