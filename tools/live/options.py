"""The words of a command line that say which job is followed, and the follower of it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.elastic.channel.shared_key import KEY_FILE_ENV
from holdfast.elastic.errors import ConfigError
from holdfast.tools.live.follow import Follower
from holdfast.tools.live.members.reader import MembersReader


def add_options(add: Callable[..., Any]) -> None:
    """Declare the words; ``add`` is ``ArgumentParser.add_argument``."""
    add(
        "run_dirs",
        type=Path,
        nargs="*",
        metavar="RUN_DIR",
        help="the directory that `holdfast run --run-dir` got, of a run that goes or is over; of a "
        "job on several machines the directory of each",
    )
    add(
        "--coordinator",
        metavar="ADDRESS",
        help="also ask the job's coordinator at HOST:PORT, etcd://... or managed://HOST: members, "
        "ranks and plans of all machines; without RUN_DIR there is no past",
    )
    add(
        "--job",
        metavar="NAME",
        help="the job's name at the coordinator, or that of its run (default: the only one there)",
    )
    add(
        "--key-file",
        metavar="FILE",
        help="with --coordinator: the key of the job, that of its launchers or the key.json of its "
        f"run directory (default: {KEY_FILE_ENV}, ~/.config/holdfast/key.json)",
    )


def follower(args: argparse.Namespace) -> Follower:
    """Return the follower of the job that a command line names.

    Raises ``ConfigError`` if it names none; else as `Follower` and `MembersReader`.
    """
    if not args.run_dirs and args.coordinator is None:
        raise ConfigError(
            "RUN_DIR is missing: give the directory that `holdfast run --run-dir` got, or "
            "--coordinator ADDRESS"
        )
    if args.coordinator is None and (args.job or args.key_file):
        given = "--job" if args.job else "--key-file"
        raise ConfigError(
            f"{given} is of use only with --coordinator: add it, or leave {given} out"
        )
    if args.coordinator is None:
        return Follower(*args.run_dirs)
    members = MembersReader(args.coordinator, now=time.time, key_file=args.key_file, job=args.job)
    try:
        return Follower(*args.run_dirs, members=members)
    except BaseException:
        members.close()
        raise
