"""The wrapped loops of the docs: kills during sampling and training do not affect the result."""

from __future__ import annotations

import difflib
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import PATIENT, PRELOAD, launched
from tree import HELPERS, ROOT

from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command

EXAMPLES = ROOT / "docs" / "examples"
DYING = HELPERS / "dying_grpo.py"
STEPS = 3


def test_the_plain_loop_runs_and_is_wrapped_by_forty_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, wrapped = ((EXAMPLES / f"{name}.py").read_text() for name in ("grpo", "wrap_grpo"))
    lines = list(difflib.unified_diff(plain.splitlines(), wrapped.splitlines(), n=0))[2:]
    assert sum(line[0] in "+-" for line in lines) <= 42
    result = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--steps", "1", "--result", str(result)])
    runpy.run_path(str(EXAMPLES / "grpo.py"), run_name="__main__")
    assert 0 <= json.loads(result.read_text())["reward"] <= 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("example", "prompts"),
    [("wrap_grpo", 8), pytest.param("own_policies", 4, marks=pytest.mark.exhaustive)],
)
def test_kills_in_sampling_and_in_training_leave_no_trace(
    tmp_path: Path, example: str, prompts: int
) -> None:
    alone, result = tmp_path / "alone.json", tmp_path / "result.json"
    words = [sys.executable, EXAMPLES / f"{example}.py", "--steps", STEPS, "--result", alone]
    flags = ["--example", example, "--count", tmp_path, "--sampled", 300, "--trained", 3]
    flags += ["--steps", STEPS, "--result", result]
    nodes = [NodeSpec(name=name, domain=name, slots={"trainer": 1}) for name in ("a", "b")]
    config = LaunchConfig(
        command=python_command(DYING, [*map(str, flags)]),
        nodes=tuple(nodes),
        wanted={"trainer": 2},
        run_dir=tmp_path / "run",
        timing=PATIENT,
        preload=PRELOAD,
    )
    with subprocess.Popen([*map(str, words)]) as undisturbed, launched(config) as job:
        outcome = job.finish()
        assert outcome.ok, outcome.message
        recovered = [e for e in job.events("rollout_recovered") if e["tokens"]]
        assert undisturbed.wait(timeout=250) == 0
    expected, found = (json.loads(path.read_text()) for path in (alone, result))
    assert expected["ordinals"]["trained"] == STEPS * prompts
    for key in ("final_hash", "reward", "ordinals"):
        assert found[key] == expected[key]
    assert found.get("policies") == expected.get("policies")
    assert found["violations"] == expected["violations"] == []
    assert len(recovered) == 2, "once in the midst of sampling, once in the midst of training"
    assert recovered[1]["unfinished"] == 0
    sampled = (tmp_path / "sampled").stat().st_size
    assert sampled == expected["tokens_sampled"], "no token was sampled twice"
    assert (tmp_path / "trained").stat().st_size == STEPS + 1, "one step was begun again"
