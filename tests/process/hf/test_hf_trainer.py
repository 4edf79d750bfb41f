"""A Trainer of transformers with Holdfast's loop: killed, resumed, and beside its own loop."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_packages import needs
from forked_scripts import ran
from jobs import PRELOAD, launched, trainers

SCRIPT = Path(__file__).parents[1] / "helpers" / "hf_training.py"

IMPORTS = (*PRELOAD, "transformers.trainer", "transformers.models.llama.modeling_llama")
"""Modules that the script imports."""

WRITTEN = [
    *("end.json", "log.jsonl", "final/model.safetensors"),
    "out/checkpoint-9/model.safetensors",
]
"""Files whose bytes are those of a run on one rank without FSDP."""

pytestmark = needs("transformers", "accelerate")


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def trained(folder: Path, *options: str) -> Any:
    folder.mkdir(exist_ok=True)
    ran([sys.executable, SCRIPT, folder, *options], check=True, imports=IMPORTS)
    return json.loads((folder / "end.json").read_text())


def moments_of(folder: Path) -> Any:
    """Return the state of the optimizer in the last checkpoint of the Trainer."""
    return torch.load(folder / "out" / "checkpoint-9" / "optimizer.pt")["state"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run on one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        folder = tmp_path_factory.mktemp("alone")
        end = trained(folder, "--exact", "float32")
    assert end["step"] == 9, "early stopping ends it after three evaluations"
    assert end["best"] == "out/checkpoint-9"
    last = next(each for each in reversed(end["history"]) if "eval_loss" in each)
    assert end["evaluated"].items() <= last.items(), "the Trainer's own evaluation is the same"
    return folder


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--kill", "7", "3"], id="in a step"),
        pytest.param(
            ["--fsdp", "--kill", "7", "3"], id="in a step, with FSDP2", marks=pytest.mark.exhaustive
        ),
        pytest.param(["--fsdp", "--fatal-batch", "3"], id="in an evaluation, with FSDP2"),
    ],
)
def test_a_job_of_two_ranks_that_loses_one_ends_as_one_rank(
    options: list[str], alone: Path, tmp_path: Path
) -> None:
    config = trainers(
        SCRIPT,
        [str(tmp_path), "--exact", "float32", *options],
        nodes=2,
        run_dir=tmp_path / "run",
        preload=IMPORTS,
    )
    with launched(config) as running:
        outcome = running.finish()
        assert outcome.ok, outcome.message
    assert (tmp_path / "died").exists()
    for name in WRITTEN:
        assert (tmp_path / name).read_bytes() == (alone / name).read_bytes(), name
    found, wanted = map(moments_of, (tmp_path, alone))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    kept = sorted(each.name for each in (tmp_path / "out").iterdir())
    assert kept == ["checkpoint-6", "checkpoint-9"]


def test_each_step_is_logged_once_and_in_order(alone: Path) -> None:
    lines = [json.loads(line) for line in (alone / "log.jsonl").read_text().splitlines()]
    steps = [step for step, logs in lines if "grad_norm" in logs]
    evaluated = [step for step, logs in lines if "eval_loss" in logs]
    assert (steps, evaluated) == ([2, 4, 6, 8], [3, 6, 9])
    history = json.loads((alone / "end.json").read_text())["history"]
    assert [{**logs, "step": step} for step, logs in lines] == history


def test_a_run_goes_on_from_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    wanted = trained(whole, "--patience", "9")
    for options in ([], ["--fsdp"]):
        rest = tmp_path / f"rest{len(options)}"
        shutil.copytree(whole / "out" / "checkpoint-9", rest / "out" / "checkpoint-9")
        found = trained(rest, "--patience", "9", "--resume", "out/checkpoint-9", *options)
        assert (found["hash"], found["step"]) == (wanted["hash"], wanted["step"])
        assert found["step"] == 12


def test_the_losses_are_those_of_the_trainers_own_loop(tmp_path: Path) -> None:
    theirs, ours = trained(tmp_path, "--compare", "--steps", "6")
    assert len(theirs) == len(ours) == 4
    for one, other in zip(theirs, ours, strict=True):
        assert other == pytest.approx(one, rel=1e-4)
