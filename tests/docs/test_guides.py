"""The programs of the guides run alone and print what the guides show."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
from document_blocks import blocks, run_script
from forked_scripts import ran

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.environments.base import Action
from holdfast.adapters.rl.environments.registry import EnvironmentConfig, make_environment
from holdfast.adapters.rl.policy.settings import PolicyConfig
from holdfast.adapters.rl.rollout.speakers import judges_of
from holdfast.adapters.rl.weights.setup import Policies

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
        if '"turns"' in b
    ]
    settings |= {"steps": 3, "held_out": 8, "groups": 2}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "holdfast.rl", "--config", "config.json"]
    done = ran([*command, "--result", "result.json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert (result["steps"], result["ledger"]["ok"]) == (3, True)
    assert len(result["heldout"]) == 2


def test_the_environments_of_the_guide_to_several_policies_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = blocks(DOCS / "how-to" / "policies.md", "python")
    debate, judged, scored = (each for each in written if "\nclass " in each)
    (tmp_path / "debating.py").write_text(debate)
    (tmp_path / "judging.py").write_text(judged)
    monkeypatch.syspath_prepend(tmp_path)
    debating = make_environment(EnvironmentConfig(factory="debating:Debate"), seed=1)
    said = Action(ordinal=3, sample=0, turn=0, text="b", ended=True, speaker="solver")
    asked = debating.respond(said)
    assert (debating.prompt(3), asked.text, asked.speaker) == ("4>", "?", "critic")
    objected = debating.respond(msgspec.structs.replace(said, turn=1, text="a", speaker="critic"))
    assert objected.speaker == "solver"
    last = msgspec.structs.replace(said, turn=2, text="b", state=objected.state)
    assert debating.respond(last).rewards == {"solver": 1.0, "critic": 0.0}

    config = RLConfig(policies={"one": PolicyConfig(), "judge": PolicyConfig(frozen=True)})
    judging = make_environment(
        EnvironmentConfig(factory="judging:Judged"),
        seed=1,
        frozen_policies=judges_of(config, Policies(config).each()),
    )
    reward = judging.respond(msgspec.structs.replace(said, text="ab")).reward
    assert reward is not None
    assert reward < 0

    (tmp_path / "scoring.py").write_text(scored)
    scoring = make_environment(
        EnvironmentConfig(factory="scoring:Scored"), seed=1, frozen_policies={"reward": Lengths()}
    )
    assert scoring.respond(msgspec.structs.replace(said, text="ab")).reward == 6.0


class Lengths:
    """A classifier with one class, which scores texts by their lengths."""

    def __init__(self) -> None:
        self.classes = ["LENGTH"]

    def scores(self, text: str, answer: str | None = None) -> list[float]:
        return [float(len(text))]
