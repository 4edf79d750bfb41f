"""GRPO that samples from the rollout ledger: killed at any moment, no logged token is lost."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import environments
import pytest
from jobs import Job, launched, trainers
from programs import JOB_S, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
JOB = HERE / "ledger_job.py"
STEPS, PROMPTS = 4, 2
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
SAVED = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def alone(trl: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of undisturbed runs on one rank, by who samples."""
    found = {}
    for by in ("model", "function"):
        found[by] = folder = tmp_path_factory.mktemp(by)
        settings = {"by": by, **EVALUATED, **SAVED}
        trl("python", str(JOB), str(folder), json.dumps(settings))
    return found


def results(folder: Path) -> tuple[bytes, bytes]:
    """Return the last weights and the logs of a run."""
    log = (folder / "log.jsonl").read_bytes()
    return (folder / "final" / "model.safetensors").read_bytes(), log


def sampled(folder: Path) -> Counter[str]:
    """Return the tokens that were sampled for training, each with its place."""
    lines = (folder / "rolled").read_text().splitlines()
    return Counter(lines)


def report_of(folder: Path) -> dict[str, Any]:
    """Return the counts of the ledger."""
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


@contextmanager
def job(
    folder: Path, words: list[str], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Job]:
    """Run the job on two ranks of two nodes until it is over."""
    for name, value in environments.variables("trl").items():
        monkeypatch.setenv(name, value)
    config = trainers(JOB, [str(folder), *words], nodes=2, run_dir=run_dir, preload=())
    python = str(environments.python("trl"))
    with launched(replace(config, command=(python, *config.command[1:]))) as running:
        yield running
        outcome = running.launcher.wait(JOB_S)  # its workers import TRL, each for itself
        assert outcome is not None, "the job is not over"
        assert outcome.ok, outcome.message


@pytest.mark.parametrize(
    ("by", "moment", "count", "seat"),
    [
        ("function", "token", 3, "trainer/0"),  # in the first sample of all
        ("function", "token", 38, "trainer/0"),  # in the second step
        ("function", "reward", 2, "trainer/0"),  # all is sampled, and not all is rewarded
        ("function", "loss", 2, "trainer/1"),
        ("model", "token", 30, "trainer/0"),  # three answers are in progress
        ("model", "loss", 3, "trainer/0"),
    ],
)
def test_a_job_killed_in_a_step_ends_as_one_rank_left_alone(
    by: str,
    moment: str,
    count: int,
    seat: str,
    alone: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    settings = json.dumps({"by": by, **EVALUATED})
    words = [settings, "--die", moment, str(count), "--seat", seat]
    with job(folder, words, tmp_path / "run", monkeypatch) as running:
        pass
    recovered = [event["tokens"] for event in running.events("rollout_recovered")]
    assert (folder / "died").exists()
    assert results(folder) == results(alone[by])
    told, wanted = report_of(folder), report_of(alone[by])
    assert told["ordinals"] == wanted["ordinals"]
    assert told["ordinals"]["trained"] == STEPS * PROMPTS
    assert told["violations"] == []
    assert told["tokens_resampled"] == 0
    assert sampled(folder) == sampled(alone[by]), "no token that is logged is sampled again"
    if moment == "token":
        assert sum(recovered) > 0


@contextmanager
def sampler(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that samples for the job in the folder."""
    command = [str(environments.python("trl")), str(JOB), str(folder), "--sample", *words]
    process = subprocess.Popen(command, env=environments.variables("trl"))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_other_processes_sample_and_any_may_be_killed(
    alone: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trl: Run
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    settings = json.dumps({"by": "others", **EVALUATED, "eval_strategy": "no"})
    words = [settings, "--die", "loss", "3"]
    with job(folder, words, tmp_path / "run", monkeypatch):
        with sampler(folder, "--die", "token", "20") as first:
            assert first.wait(JOB_S) in (0, -signal.SIGKILL)
        with sampler(folder) as second:
            assert second.wait(JOB_S) == 0
    told = report_of(folder)
    assert told["ordinals"]["trained"] == STEPS * PROMPTS
    assert told["violations"] == []
    assert set(sampled(folder).values()) == {1}, "no token that is logged is sampled again"
    weights = (folder / "final" / "model.safetensors").read_bytes()
    by_rank_0 = tmp_path / "by_rank_0"
    by_rank_0.mkdir()
    trl("python", str(JOB), str(by_rank_0), json.dumps({"by": "function"}))
    assert weights == (by_rank_0 / "final" / "model.safetensors").read_bytes()
    assert sampled(folder) == sampled(by_rank_0)


def test_a_run_goes_on_longer_from_a_checkpoint_with_its_ledger(
    alone: dict[str, Path], trl: Run, tmp_path: Path
) -> None:
    name = "out/checkpoint-2"
    shutil.copytree(alone["function"] / name, tmp_path / name)
    settings = {"by": "function", "max_steps": 5}
    trl("python", str(JOB), str(tmp_path), json.dumps(settings), "--resume", name)
    told = report_of(tmp_path)
    assert told["ordinals"]["trained"] == 5 * PROMPTS
    assert told["violations"] == []
    ordinals = {int(line.split()[0]) for line in sampled(tmp_path)}
    assert ordinals == set(range(2 * PROMPTS, 5 * PROMPTS))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_iterations": 2}, "num_iterations=2 trains a sample 2 times"),
        ({"steps_per_generation": 4}, "a round of 4 microbatches .* one step of 2"),
        ({"held": {"snapshot_every": 2}}, "each step needs a snapshot"),
        ({"top_p": 0.9}, "top_p=0.9 is not supported where the model samples"),
    ],
)
def test_what_the_ledger_cannot_count_once_is_refused(
    settings: dict[str, Any], said: str, trl: Run, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=said):
        trl("python", str(JOB), str(tmp_path), json.dumps({"by": "model", **settings}))


def test_a_checkpoint_without_a_ledger_is_refused(
    alone: dict[str, Path], trl: Run, tmp_path: Path
) -> None:
    name = "out/checkpoint-2"
    shutil.copytree(alone["function"] / name, tmp_path / name)
    (tmp_path / name / "holdfast_ledger.json").unlink()
    with pytest.raises(AssertionError, match="has no ledger of its 2 steps"):
        settings = json.dumps({"by": "function"})
        trl("python", str(JOB), str(tmp_path), settings, "--resume", name)
