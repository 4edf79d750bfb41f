"""The code blocks of a document, and a runner that executes one as a script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def blocks(document: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w+)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    return [body for name, body in fenced if name == language]


def run_script(directory: Path, source: str) -> str:
    """Run a block as a script of its own; return its output."""
    script = directory / "train.py"
    script.write_text(source)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
