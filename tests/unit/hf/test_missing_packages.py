"""Without transformers or accelerate the adapter says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src"
CALL = "from holdfast.adapters.hf import resilient_trainer; resilient_trainer(dict)"


@pytest.mark.parametrize("missing", ["accelerate", "transformers"])
def test_a_missing_package_is_told_with_its_extra(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; {CALL}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=SOURCE, check=False
    )
    assert "pip install 'holdfast[hf]', or 'holdfast[trl]'" in done.stderr
