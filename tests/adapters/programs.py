"""Programs of other libraries' environments, as tests run them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import environments
import pytest

Run = Callable[..., str]
"""Runs a command of an environment's ``bin``; returns what it printed."""

JOB_S = 600


def runner(name: str) -> Run:
    """Return a function that runs programs of an environment; skip where it is not wanted."""
    if not environments.wanted():
        pytest.skip(f"{environments.SWITCH}=1 (make adapters) runs the tests with {name}")
    try:
        folder = environments.python(name).parent
    except environments.CannotMakeError as error:
        pytest.fail(f"the environment {name} cannot be made: {error}", pytrace=False)

    def run(program: str, *arguments: str, cwd: Path | None = None) -> str:
        process = subprocess.Popen(
            [str(folder / program), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd or Path(os.sep),
            env=environments.variables(name),
            start_new_session=True,
        )
        try:
            said, erred = process.communicate(timeout=JOB_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it started, too
            process.wait()
            raise
        assert process.returncode == 0, said[-3000:] + erred[-6000:]
        return said

    return run
