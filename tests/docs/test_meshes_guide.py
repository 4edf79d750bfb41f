"""The example of the guide to meshes runs alone, and trains."""

from __future__ import annotations

import re
from pathlib import Path

from test_documents import blocks, run_script

GUIDE = Path(__file__).parents[2] / "docs" / "meshes.md"


def test_the_example_trains_alone(tmp_path: Path) -> None:
    said = run_script(tmp_path, blocks(GUIDE, "python")[0])
    found = re.fullmatch(r"60 steps, loss (\d+\.\d+)\n", said)
    assert found is not None and float(found[1]) < 4.0
