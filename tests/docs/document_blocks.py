"""The code blocks of a document, and a runner that executes one as a script."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from forked_scripts import ran


def blocks(document: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w+)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    return [body for name, body in fenced if name == language]


def run_script(directory: Path, source: str) -> str:
    """Run a block as a script of its own; return its output."""
    script = directory / "train.py"
    script.write_text(source)
    done = ran([sys.executable, script], cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout
