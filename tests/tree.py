"""Paths of this repository for tests in any folder."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
HELPERS: Final = ROOT / "tests" / "process" / "helpers"
"""The scripts that tests of real processes start."""
