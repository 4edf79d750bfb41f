"""Prometheus' own checker of rules and metrics, for tests.

By hand: ``python tests/services/promtool.py --install`` fetches it if it is missing. Nothing needs
root: Debian's package is unpacked, not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from debian import unpack
from keeper import CannotInstall, required


def program() -> Path:
    """Return the promtool to run: the system's, else one unpacked before or now.

    Raises ``CannotInstall``.
    """
    if found := shutil.which("promtool"):
        return Path(found)
    base = os.environ.get("XDG_CACHE_HOME")
    cache = Path(base) if base else Path.home() / ".cache"
    kept = cache / "holdfast" / "prometheus" / "promtool"
    if not kept.exists():
        unpack("prometheus", program="promtool", target=kept)
    return kept


def checked(*words: str, given: str = "", folder: Path | None = None) -> str:
    """Run promtool and return its output; fail with it. Skip where it cannot be installed."""
    try:
        tool = program()
    except CannotInstall as error:
        if required("promtool"):
            raise
        import pytest  # `--install` runs before the environment is there

        pytest.skip(str(error))
    done = subprocess.run(
        [tool, *words],
        input=given,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


if __name__ == "__main__" and sys.argv[1:] == ["--install"]:
    program()
