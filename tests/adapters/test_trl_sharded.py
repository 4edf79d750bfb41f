"""TRL's trainers with FSDP2: a job that loses a rank ends as one rank whose model is not cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import environments
import pytest
from jobs import launched, trainers
from programs import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

JOB = Path(__file__).with_name("trl_job.py")


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_job_of_two_ranks_that_loses_one_ends_as_one_rank(
    kind: str, lora: bool, trl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [kind, "--lora"] if lora else [kind]
    alone, job = tmp_path / "alone", tmp_path / "job"
    alone.mkdir()
    job.mkdir()
    trl("python", str(JOB), str(alone), *options)
    for name, value in environments.variables("trl").items():
        monkeypatch.setenv(name, value)
    words = [job, *options, "--fsdp", "--kill", "6", "3"]
    config = trainers(JOB, words, nodes=2, run_dir=tmp_path / "run", preload=())
    python = str(environments.python("trl"))
    config = replace(config, command=(python, *config.command[1:]))
    with launched(config) as running:
        outcome = running.finish()
        assert outcome.ok, outcome.message
    assert (job / "died").exists()
    (weights,) = [each.name for each in (alone / "final").glob("*.safetensors")]
    for name in (f"final/{weights}", "log.jsonl"):
        assert (job / name).read_bytes() == (alone / name).read_bytes(), name
