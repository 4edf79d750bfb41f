"""The example of the docs with two policies: kills in sampling and in training show in neither."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import PATIENT, PRELOAD, launched
from tree import HELPERS, ROOT

from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command

EXAMPLE = ROOT / "docs" / "examples" / "own_policies.py"
DYING = HELPERS / "dying_grpo.py"
STEPS, PROMPTS = 3, 4


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_kills_in_sampling_and_in_training_show_in_neither_policy(tmp_path: Path) -> None:
    alone, result = tmp_path / "alone.json", tmp_path / "result.json"
    words = [sys.executable, EXAMPLE, "--steps", STEPS, "--result", alone]
    flags = ["--example", "own_policies", "--count", tmp_path, "--sampled", 300, "--trained", 2]
    flags += ["--steps", STEPS, "--result", result]
    config = LaunchConfig(
        command=python_command(DYING, [*map(str, flags)]),
        nodes=tuple(NodeSpec(name=name, domain=name, slots={"trainer": 1}) for name in "ab"),
        wanted={"trainer": 2},
        run_dir=tmp_path / "run",
        timing=PATIENT,
        preload=PRELOAD,
    )
    with subprocess.Popen([*map(str, words)]) as undisturbed, launched(config) as job:
        outcome = job.finish()
        assert outcome.ok, outcome.message
        recovered = [e for e in job.events("rollout_recovered") if e["tokens"]]
        assert undisturbed.wait(timeout=600) == 0
    expected, found = (json.loads(path.read_text()) for path in (alone, result))
    assert expected["ordinals"]["trained"] == STEPS * PROMPTS
    for key in ("final_hash", "reward", "ordinals", "policies"):
        assert found[key] == expected[key]
    assert found["violations"] == expected["violations"] == []
    assert min(book["tokens"] for book in found["policies"].values()) > 0
    assert len(recovered) == 2, "once in the midst of sampling, once in the midst of training"
    sampled = (tmp_path / "sampled").stat().st_size
    assert sampled == expected["tokens_sampled"], "no token was sampled twice"
