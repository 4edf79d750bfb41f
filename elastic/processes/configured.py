"""The start of Holdfast's own processes, which are given their configuration by a descriptor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.descriptors import descriptor_of
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.processes.children import Child, describe_exit
from holdfast.elastic.processes.log_files import last_words

_LOOK_S: Final = 0.02


def configured_argv(module: str, *, name: str, fd: int) -> tuple[str, ...]:
    """Return the command of a module that reads its configuration from the descriptor ``fd``.

    ``-P`` keeps the user's directory off its path.
    """
    return (sys.executable, "-P", "-m", module, "--name", name, "--config-fd", str(fd))


def start_configured(
    module: str,
    config: msgspec.Struct,
    *,
    name: str,
    tied: bool,
    env: Mapping[str, str] = os.environ,
    stdin: int = subprocess.DEVNULL,
    output: Path | None = None,
) -> Child:
    """Start the process of a module, see `configured_argv`. Raises ``OSError``.

    The other arguments are as in `Child.start`.
    """
    with descriptor_of(msgspec.json.encode(config)) as fd:
        return Child.start(
            configured_argv(module, name=name, fd=fd),
            env=env,
            tied=tied,
            stdin=stdin,
            output=output,
            pass_fds=(fd,),
        )


def await_ready(
    child: Child, ready: Callable[[], bool], *, what: str, log: Path, within_s: float
) -> None:
    """Wait until a child that was just started is ``ready``.

    Raises ``CoordinatorError``, with the end of its ``log``, if it ends or is not ready in time.
    """
    deadline_s = time.monotonic() + within_s
    while not ready():
        if child.poll() is not None or time.monotonic() > deadline_s:
            child.kill()
            how = describe_exit(child.code) if child.code is not None else "no answer"
            raise CoordinatorError(f"{what} does not start ({how}): {last_words(log)}")
        time.sleep(_LOOK_S)
