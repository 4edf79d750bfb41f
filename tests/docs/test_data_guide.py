"""The guide to data: its programs run, alone, and say what it says."""

from __future__ import annotations

from pathlib import Path

from test_documents import blocks, run_script

GUIDE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_programs_of_the_guide_train_whole_epochs(tmp_path: Path) -> None:
    first, second = blocks(GUIDE, "python")
    assert run_script(tmp_path, first) == blocks(GUIDE, "text")[0]
    assert run_script(tmp_path, second) == "2\n"
