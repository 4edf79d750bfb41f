"""Train with TRL as the process tests do, from an environment that has neither pytest nor paths."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

if __name__ == "__main__":
    helpers = TESTS / "process" / "helpers"
    sys.path[:0] = [str(helpers), str(TESTS / "loops")]
    runpy.run_path(str(helpers / "trl_training.py"), run_name="__main__")
