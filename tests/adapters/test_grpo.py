"""GRPO: equal to TRL's own loop; killed within rounds; resumed within a round."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import environments
import pytest
from jobs import launched, trainers
from programs import JOB_S, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
CASES, JOB = HERE / "grpo_cases.py", HERE / "grpo_job.py"

SETTINGS: dict[str, dict[str, Any]] = {
    "one step a round": {},
    "three iterations": {"num_iterations": 3, "max_steps": 8},
    "six slices": {"steps_per_generation": 6, "max_steps": 7},
    "two rounds a step": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "a round for each microbatch": {"gradient_accumulation_steps": 3, "steps_per_generation": 1},
    "rounds begin within steps": {
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_steps": 8,
    },
    "groups larger than a slice": {
        "per_device_train_batch_size": 2,
        "num_generations": 4,
        "steps_per_generation": 4,
    },
    "groups of six in slices of four": {"num_generations": 6, "steps_per_generation": 6},
    "two epochs": {"max_steps": -1, "num_train_epochs": 2, "prompts": 13, "num_iterations": 2},
    "a short last step": {
        "max_steps": -1,
        "num_train_epochs": 2,
        "prompts": 14,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 1,
    },
    "grpo": {"loss_type": "grpo", "num_iterations": 2},
    "bnpo": {"loss_type": "bnpo", "num_iterations": 2},
    "dr_grpo": {"loss_type": "dr_grpo", "num_iterations": 2},
    "cispo": {"loss_type": "cispo", "num_iterations": 2},
    "vespo": {"loss_type": "vespo", "num_iterations": 2},
    "sapo": {"loss_type": "sapo", "num_iterations": 2},
    "luspo": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "learning_rate": 0.01,
        "num_iterations": 2,
    },
    "spread of a batch": {"scale_rewards": "batch", "steps_per_generation": 4},
    "no spread, masked": {
        "scale_rewards": "none",
        "mask_truncated_completions": True,
        "steps_per_generation": 4,
    },
    "two rewards": {"both": True, "reward_weights": [1.0, 0.5], "steps_per_generation": 4},
    "normalize, then sum": {
        "both": True,
        "multi_objective_aggregation": "normalize_then_sum",
        "steps_per_generation": 4,
    },
    "reference model": {"beta": 0.2, "use_bias_correction_kl": True, "num_iterations": 2},
    "adapter": {"lora": True, "beta": 0.2, "num_iterations": 2},
    "top entropy": {"top_entropy_quantile": 0.5, "num_iterations": 2},
    "clipped, logged every second step": {
        "epsilon": 0.05,
        "epsilon_high": 0.1,
        "delta": 1.5,
        "num_iterations": 3,
        "logging_steps": 2,
    },
    "in order, padded": {"shuffle_dataset": False, "pad_to_multiple_of": 8, "num_iterations": 2},
    "the likeliest tokens": {"rolls": False, "top_k": 1, "beta": 0.5, "steps_per_generation": 4},
}


@pytest.fixture(scope="module")
def logs(trl: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the logs and weights of every case, of TRL's loop and of Holdfast's."""
    folder = tmp_path_factory.mktemp("cases")
    told = trl("python", str(CASES), str(folder), json.dumps(SETTINGS))
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def near(first: float | None, second: float | None) -> bool:
    """True for values that differ by rounding."""
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=1e-4, abs_tol=1e-5)


def differences(wanted: list[Any], found: list[Any]) -> list[Any]:
    """Return the steps and names of logs that are not near to each other."""
    wrong: list[Any] = []
    for (step, first), (number, second) in zip(wanted, found, strict=True):
        if step != number or first.keys() != second.keys():
            wrong.append((step, number, first.keys() ^ second.keys()))
            continue
        pairs = {key: (first[key], second[key]) for key in first}
        wrong += [(step, key, *pair) for key, pair in pairs.items() if not near(*pair)]
    return wrong


@pytest.mark.parametrize("name", SETTINGS)
def test_logs_and_weights_are_those_of_trl(name: str, logs: dict[str, Any]) -> None:
    theirs, ours = logs[name]
    assert differences(theirs["logs"], ours["logs"]) == []
    assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-5)


# -- jobs that are killed ------------------------------------------------------------------------

ROUNDS = {"num_iterations": 2, "steps_per_generation": 4, "beta": 0.1}
"""Rounds of four steps each."""


@pytest.fixture(scope="module")
def alone(trl: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Return the folders of undisturbed runs on one rank, without and with a rollout function."""
    found = {}
    for rolls in (False, True):
        found[rolls] = folder = tmp_path_factory.mktemp(f"alone-{rolls}")
        saves = {"save_strategy": "steps", "save_steps": 1}
        trl("python", str(JOB), str(folder), json.dumps({**ROUNDS, **saves, "rolls": rolls}))
    return found


def results(folder: Path) -> tuple[bytes, bytes]:
    """Return the last weights and the logs of a run."""
    log = (folder / "log.jsonl").read_bytes()
    return (folder / "final" / "model.safetensors").read_bytes(), log


@pytest.mark.parametrize(
    ("rolls", "moment", "count"),
    [
        (True, "rollout", 2),  # rank 1 has sampled one chunk of the first round
        (True, "reward", 2),
        (True, "loss", 2),  # in the second step of a round
        (True, "step", 4),  # between two steps of a round
        (True, "rollout", 4),  # in the second round
        (False, "loss", 3),
        (False, "reward", 2),
    ],
)
def test_a_job_killed_within_a_round_ends_as_one_rank_left_alone(
    rolls: bool,
    moment: str,
    count: int,
    alone: dict[bool, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environments.variables("trl").items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "job"
    folder.mkdir()
    words = [str(folder), json.dumps({**ROUNDS, "rolls": rolls}), "--die", moment, str(count)]
    config = trainers(JOB, words, nodes=2, run_dir=tmp_path / "run", preload=())
    python = str(environments.python("trl"))
    config = replace(config, command=(python, *config.command[1:]))
    with launched(config) as running:
        outcome = running.launcher.wait(JOB_S)  # its workers import TRL, each for itself
        assert outcome is not None, "the job is not over"
        assert outcome.ok, outcome.message
    assert (folder / "died").exists()
    assert results(folder) == results(alone[rolls])
    if rolls:
        sampled = Counter((folder / "rolled").read_text().splitlines())
        assert sampled == Counter((alone[rolls] / "rolled").read_text().splitlines())
        assert set(sampled.values()) == {1}, "no finished chunk is sampled again"


@pytest.mark.parametrize("step", [2, 4])
def test_a_run_goes_on_within_a_round_from_a_checkpoint(
    step: int, alone: dict[bool, Path], trl: Run, tmp_path: Path
) -> None:
    name = f"out/checkpoint-{step}"
    shutil.copytree(alone[True] / name, tmp_path / name)
    trl("python", str(JOB), str(tmp_path), json.dumps(ROUNDS), "--resume", name)
    # With exact= the grid of the gradients begins anew, so the last bits may differ.
    wanted, found = (
        [json.loads(line) for line in (each / "log.jsonl").read_text().splitlines()[:-1]]
        for each in (alone[True], tmp_path)
    )
    assert differences(wanted[step:], found) == []
    first = (alone[True] / "rolled").read_text().splitlines()
    assert (tmp_path / "rolled").read_text().splitlines() == first[-len(first) // 2 :]


def test_a_checkpoint_without_the_completions_of_its_round_is_refused(
    alone: dict[bool, Path], trl: Run, tmp_path: Path
) -> None:
    name = "out/checkpoint-3"
    shutil.copytree(alone[True] / name, tmp_path / name)
    (tmp_path / name / "holdfast_rounds.safetensors").unlink()
    with pytest.raises(AssertionError, match="in the middle of a round of completions"):
        trl("python", str(JOB), str(tmp_path), json.dumps(ROUNDS), "--resume", name)
