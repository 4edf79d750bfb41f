"""The programs of the guides run, alone, and say what the guides let them say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_documents import blocks, run_script

DOCS = Path(__file__).parents[2] / "docs"


def test_the_programs_of_the_guide_to_data_train_whole_epochs(tmp_path: Path) -> None:
    first, second = blocks(DOCS / "data.md", "python")
    assert run_script(tmp_path, first) == blocks(DOCS / "data.md", "text")[0]
    assert run_script(tmp_path, second) == "2\n"


@pytest.mark.parametrize(
    ("guide", "number", "said"),
    [
        pytest.param("detection", 0, r"30 steps in 2 generations, error [\d.]+\n", id="goes back"),
        pytest.param("exactness", 0, r"30 steps, loss [\d.]+\n", id="DDP in fixed point"),
        pytest.param("meshes", 0, r"60 steps, loss [0-3]\.\d+\n", id="a mesh of one"),
        pytest.param("meshes", 1, r"60 steps in 4 stages, loss 0\.\d+\n", id="several stages"),
        pytest.param("meshes", 2, r"60 steps, loss 0\.[01]\d\n", id="experts"),
    ],
)
def test_a_program_of_a_guide_trains(tmp_path: Path, guide: str, number: int, said: str) -> None:
    program = blocks(DOCS / f"{guide}.md", "python")[number]
    assert re.fullmatch(said, run_script(tmp_path, program))
