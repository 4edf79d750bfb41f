"""Programs of other libraries' environments, as tests run them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import environments
import pytest

Run = Callable[..., str]
"""Runs a command of an environment's ``bin``; returns what it printed."""

JOB_S = 280


def runner(name: str) -> Run:
    """Return a function that runs programs of an environment; skip where it is not wanted."""
    if not environments.wanted():
        pytest.skip(f"{environments.SWITCH}=1 (make adapters) runs the tests with {name}")
    try:
        folder = environments.python(name).parent
    except environments.CannotMakeError as error:
        pytest.fail(f"the environment {name} cannot be made: {error}", pytrace=False)

    def run(program: str, *arguments: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [str(folder / program), *arguments],
            capture_output=True,
            text=True,
            timeout=JOB_S,
            cwd=cwd or Path(os.sep),
            env=environments.variables(name),
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done.stdout

    return run
