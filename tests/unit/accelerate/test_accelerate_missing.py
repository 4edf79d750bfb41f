"""Without accelerate the adapter says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"
CODE = """
import sys
from types import SimpleNamespace
sys.modules["accelerate"] = None
from holdfast.adapters.accelerate import AcceleratorCheckpoints
AcceleratorCheckpoints(SimpleNamespace(project_configuration=None), "runs/a")
"""


def test_a_missing_package_is_told_with_its_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, cwd=SOURCE, check=False
    )
    assert "pip install 'holdfast[hf]'" in done.stderr
