"""Options of commands that start a job: other roles, the script's settings, the story it tells."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

from holdfast.ckpt.types import Json
from holdfast.elastic.config import Checkpoints, Settings
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events.log import HISTORY_BYTES
from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.sea.settings import Islands
from holdfast.tools.settings.keys import GIVEN, OPTIONS
from holdfast.tools.show.levels import LEVELS
from holdfast.tools.show.telling import FORMATS
from holdfast.tools.subcommand import positive
from holdfast.tools.terminal import parse_bytes


def add_roles(add: Callable[..., Any]) -> None:
    """Declare the option for other roles; ``add`` is ``ArgumentParser.add_argument``."""
    add(
        "--role",
        type=_role,
        action="append",
        default=[],
        metavar="NAME=N",
        help="N workers of another role beside the trainers; repeatable",
    )


def add_module(add: Callable[..., Any]) -> None:
    """Declare the option for modules; ``add`` is ``ArgumentParser.add_argument``."""
    add(
        "-m",
        "--module",
        action="store_true",
        help="SCRIPT is the name of a module, to be run as python -m runs it",
    )


def add_options(add: Callable[..., Any]) -> None:
    """Declare the options of `settings`; ``add`` is ``ArgumentParser.add_argument``."""
    add(
        "--parity",
        type=parity_number,
        metavar="M",
        help="nodes that may be lost with their memory, or 'replicate' for whole copies "
        "(default: the script's value)",
    )
    add(
        "--parity-group",
        type=positive,
        metavar="N",
        help="preferred number of nodes that guard each other (default: the script's value)",
    )
    add(
        "--memory",
        metavar="SIZE",
        help="host memory a node may spend on snapshots, as in 12GiB (default: no limit)",
    )
    add(
        "--checkpoint-bandwidth",
        metavar="RATE",
        help="limit of a node's checkpoint writes, as in 500MB/s (default: no limit)",
    )
    add(
        "--on-checkpoint-error",
        choices=("retry", "skip", "stop"),
        help="when a checkpoint cannot be written: try again and end the job only after several, "
        "never end it, or end it at once (default: the script's value)",
    )
    add(
        "--disk",
        metavar="DIR",
        help="spill snapshots to DIR on every node's own disk, and resume from the snapshots "
        "that are there",
    )
    add(
        "--stop-grace-s",
        type=float,
        metavar="S",
        help="on SIGTERM take up to S seconds to save the newest protected step (default 0)",
    )
    add(
        "--island",
        metavar="NAME",
        help="name of this run among the islands of a sea (default: the script's value)",
    )
    add(
        "--sea",
        metavar="URL",
        help="place where the islands meet: a directory, s3://bucket/prefix, gs:// or az:// "
        "(default: the script's value)",
    )
    add(
        "--sea-key",
        metavar="FILE",
        help="key file with which islands give each other their payloads without the store; "
        "`holdfast islands key FILE` makes it (default: the script's value, or by the store)",
    )


def add_story(add: Callable[..., Any]) -> None:
    """Declare the options of what a job tells and keeps of it."""
    add(
        "--history",
        type=parse_bytes,
        default=HISTORY_BYTES,
        metavar="SIZE",
        help="keep at most SIZE of each node's events, and as much of the output of each process "
        "that is kept; at half of it a file gives way to the next (default 64MiB, at least 64KiB)",
    )
    add(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="form of the lines on stderr: text for people, or json: an object a line with time_s, "
        "level, message and, of an event, kind, node and seat (default text)",
    )
    add(
        "--log-level",
        choices=LEVELS,
        default="info",
        help="print lines of this level and above; debug has every event (default info)",
    )
    add("--quiet", action="store_true", help="print no lines on stderr but why the job failed")


def settings(args: argparse.Namespace) -> dict[str, Json]:
    """Return the script's settings that the command line and `GIVEN` override.

    Raises ``ConfigError`` for a wrong one.
    """
    found: dict[str, Any] = copy.deepcopy(getattr(args, GIVEN, {}))
    for option, (group, field) in OPTIONS.items():
        if (value := getattr(args, option)) is not None:
            found.setdefault(group, {})[field] = value
    try:
        Settings(checkpoint=Checkpoints("a script's own"), islands=Islands()).overridden(found)
    except ConfigError as error:
        raise ConfigError(f"wrong option: {error}") from error
    return found


def parity_number(text: str) -> int | str:
    """Parse a number of nodes, or ``replicate``; an argparse type."""
    if text != "replicate" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes, nor 'replicate'")
    return text if text == "replicate" else int(text)


def _role(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name.isidentifier() or name == TRAINER:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give NAME=N with a name other than {TRAINER!r}, as in rollout=2"
        )
    return name, positive(count)
