"""The programs of the guides run alone and print what the guides show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from document_blocks import blocks, run_script

DOCS = Path(__file__).parents[2] / "docs"


def test_the_programs_of_the_guide_to_data_train_whole_epochs(tmp_path: Path) -> None:
    first, second = blocks(DOCS / "how-to" / "data.md", "python")
    assert run_script(tmp_path, first) == blocks(DOCS / "how-to" / "data.md", "text")[0]
    assert run_script(tmp_path, second) == "2\n"


@pytest.mark.parametrize(
    ("guide", "number", "said"),
    [
        pytest.param("tutorials/own-loop", 0, r"loss 0\.\d+\n", id="the plain loop"),
        pytest.param(
            "tutorials/own-loop", 1, r"loss 0\.\d+, hash [0-9a-f]{12}\n", id="the wrapped loop"
        ),
        pytest.param(
            "explanation/detection", 0, r"30 steps in 2 generations, error [\d.]+\n", id="goes back"
        ),
        pytest.param(
            "explanation/exactness", 0, r"30 steps, loss [\d.]+\n", id="DDP in fixed point"
        ),
        pytest.param("how-to/collectives", 0, r"20 steps\n", id="a loss over all samples"),
        pytest.param(
            "how-to/optimizers", 0, r"loss 0\.\d+, scale 65536\n", id="through a GradScaler"
        ),
        pytest.param("how-to/fine-tuning", 0, r"loss 0\.\d+\n", id="LoRA by hand"),
        pytest.param("how-to/snapshots", 3, r"20 rows, 152\.0\n", id="a replay buffer"),
        pytest.param("how-to/optimizers", 1, r"loss 0\.\d+\n", id="LBFGS"),
        pytest.param("how-to/meshes", 0, r"60 steps, loss [0-3]\.\d+\n", id="a mesh of one"),
        pytest.param(
            "how-to/meshes", 1, r"60 steps in 4 stages, loss 0\.\d+\n", id="several stages"
        ),
        pytest.param("how-to/meshes", 2, r"60 steps, loss 0\.[01]\d\n", id="experts"),
    ],
)
def test_a_program_of_a_guide_trains(tmp_path: Path, guide: str, number: int, said: str) -> None:
    program = blocks(DOCS / f"{guide}.md", "python")[number]
    assert re.fullmatch(said, run_script(tmp_path, program))


def test_the_environment_of_the_guide_to_reinforcement_learning_trains(tmp_path: Path) -> None:
    (source,) = [
        b
        for b in blocks(DOCS / "how-to" / "reinforcement-learning.md", "python")
        if "class Guess" in b
    ]
    (tmp_path / "guess.py").write_text(source)
    (settings,) = [
        json.loads(b)
        for b in blocks(DOCS / "how-to" / "reinforcement-learning.md", "json")
        if "environment" in b
    ]
    settings |= {"steps": 3, "held_out": 8, "groups": 2}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "holdfast.rl", "--config", "config.json"]
    done = subprocess.run(
        [*command, "--result", "result.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert (result["steps"], result["ledger"]["ok"]) == (3, True)
    assert len(result["heldout"]) == 2
