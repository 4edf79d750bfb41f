"""The places of this repository that tests need, wherever a test file lies."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
HELPERS: Final = ROOT / "tests" / "process" / "helpers"
"""The scripts that tests of real processes start."""
