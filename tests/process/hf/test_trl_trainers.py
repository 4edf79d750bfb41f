"""TRL's trainers with Holdfast's loop: a job that loses a rank ends as one rank left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from adapter_packages import needs
from jobs import DEADLINE_S, launched, trainers

SCRIPT = Path(__file__).parents[1] / "helpers" / "trl_training.py"

OPTIONS = [
    *(["sft"], ["sft", "--lora"], ["dpo"], ["dpo", "--lora"]),
    *(["grpo"], ["grpo", "--lora"], ["grpo", "--loss", "grpo"]),
]

pytestmark = [
    needs("transformers", "accelerate", "trl", "peft", "datasets", "tensorboard", optional=True),
    pytest.mark.slow,
]


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows: step and value of each point, by name, without times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.rglob("events.out.*")):
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            if not any(each in name for each in ("runtime", "per_second", "step_time")):
                found.setdefault(name, []).extend((e.step, e.value) for e in events.Scalars(name))
    return found


@pytest.mark.parametrize("options", OPTIONS)
def test_a_job_of_two_ranks_that_loses_one_ends_as_one_rank(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    alone, job = tmp_path / "alone", tmp_path / "job"
    alone.mkdir()
    job.mkdir()
    words = [sys.executable, str(SCRIPT), str(alone), *options]
    subprocess.run(words, check=True, timeout=DEADLINE_S, capture_output=True)
    config = trainers(
        SCRIPT, [str(job), *options, "--kill", "6", "3"], nodes=2, run_dir=tmp_path / "run"
    )
    with launched(config) as running:
        outcome = running.finish()
        assert outcome.ok, outcome.message
    assert (job / "died").exists()
    (weights,) = [each.name for each in (alone / "final").glob("*.safetensors")]
    for name in (f"final/{weights}", "log.jsonl"):
        assert (job / name).read_bytes() == (alone / name).read_bytes(), name
    shown = points(job / "board")
    assert shown == points(alone / "board")
    assert [step for step, _ in shown["train/loss"]] == [2, 4, 6, 8, 10]
