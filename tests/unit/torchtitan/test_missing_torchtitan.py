"""Without torchtitan the adapter says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"
CALL = "from holdfast.adapters.torchtitan import holdfast_checkpoints; holdfast_checkpoints(None)"


def test_a_missing_torchtitan_is_told_with_its_extra() -> None:
    code = f"import sys; sys.modules['torchtitan'] = None; {CALL}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=SOURCE, check=False
    )
    assert "needs torchtitan 0.3" in done.stderr
    assert "pip install 'holdfast[torchtitan]'" in done.stderr
