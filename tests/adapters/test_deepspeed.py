"""A DeepSpeed engine continues from Holdfast's universal directories, on other ranks and stages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.interchange import read_all
from programs import Run

from holdfast.ckpt.convert.checkpoint import CheckpointSource
from holdfast.ckpt.convert.deepspeed.universal_source import UniversalSource
from holdfast.ckpt.convert.deepspeed.zero_source import ZeroSource
from holdfast.tools.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

JOB = Path(__file__).with_name("deepspeed_job.py")
SAVED, LAST = 3, 6


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the job: its report, and the state at its end if it was asked for."""

    report: dict[str, Any]
    truth: dict[str, torch.Tensor] = field(default_factory=dict)


class Jobs:
    """Runs jobs below one folder, each saved one once."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self.folder = run, folder
        self._saved: dict[str, Job] = {}

    def launch(self, ranks: int, **settings: Any) -> Job:
        report = self.folder / "report.json"
        told = {"first": 0, "last": SAVED, **settings, "report": str(report)}
        self._run(
            *("torchrun", f"--nproc-per-node={ranks}", "--standalone", str(JOB), json.dumps(told))
        )
        truth = torch.load(told["truth"]) if "truth" in told else {}
        return Job(report=json.loads(report.read_text()), truth=truth)

    def saved(self, name: str, ranks: int, **settings: Any) -> Job:
        """Train, save, and train on without a break: the losses to compare with."""
        if name not in self._saved:
            place = str(self.folder / name)
            told = {**settings, "save": place, "losses_of": LAST}
            self._saved[name] = self.launch(ranks, **told)
        return self._saved[name]


@pytest.fixture(scope="module")
def jobs(deepspeed: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    yield Jobs(deepspeed, tmp_path_factory.mktemp("deepspeed"))


FP16 = {"initial_scale_power": 17, "hysteresis": 1}
"""The first step overflows, the second does not."""
HPZ = {"zero_hpz_partition_size": 2}

SOURCES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (2, {"stage": 1}),
    "two": (3, {"stage": 2, "zero": {"round_robin_gradients": True}}),
    "three": (2, {"stage": 3, "zero": {"sub_group_size": 60}}),
    "half": (2, {"stage": 3, "bf16": True}),
    "scaled": (2, {"stage": 1, "fp16": {**FP16, "loss_scale_window": 2}}),
    "calm": (3, {"stage": 2, "fp16": FP16}),
    "zones": (4, {"stage": 3, "fp16": FP16, "zero": HPZ}),
    "cpu": (2, {"stage": 2, "bf16": True, "zero": {"offload_optimizer": {"device": "cpu"}}}),
}
"""Ranks and settings of the runs that save."""

TARGETS: list[tuple[str, int, dict[str, Any]]] = [
    ("one", 3, {"stage": 3, "own_steps": True}),
    ("two", 2, {"stage": 1}),
    ("three", 3, {"stage": 2}),
    ("three", 1, {"stage": 1}),
    ("half", 2, {"stage": 3, "bf16": True, "own_steps": True}),
    ("half", 3, {"stage": 2, "bf16": True}),
    ("scaled", 2, {"stage": 1, "fp16": {}}),
    ("scaled", 3, {"stage": 3, "fp16": {}, "own_steps": True}),
    ("calm", 2, {"stage": 2, "bf16": True}),
    ("zones", 4, {"stage": 3, "fp16": {}, "zero": HPZ, "own_steps": True}),
    ("zones", 2, {"stage": 1, "fp16": {}}),
    ("cpu", 2, {"stage": 3, "bf16": True, "own_steps": True}),
]
"""The saved run, and the ranks and settings of the one that continues."""


@pytest.mark.parametrize(("source", "ranks", "settings"), TARGETS)
def test_losses_are_equal_after_a_change_of_ranks_and_stage(
    jobs: Jobs, tmp_path: Path, source: str, ranks: int, settings: dict[str, Any]
) -> None:
    before = jobs.saved(source, SOURCES[source][0], **SOURCES[source][1])
    saved, middle, target = jobs.folder / source, tmp_path / "runs", tmp_path / "universal"
    assert main(["convert", str(saved), str(middle)]) == 0
    assert main(["convert", str(middle), str(target), "--to", "ds-universal"]) == 0
    told = {**settings, "universal": True, "load": str(target), "first": SAVED, "last": LAST}
    after = jobs.launch(ranks, seed=9, **told)
    assert after.report["client"] == 1234
    assert after.report["steps"] == SAVED
    limit = 2e-2 if {"bf16", "fp16"} & set(settings) else 2e-5  # gradients in another order
    if (ranks, settings["stage"]) == (SOURCES[source][0], SOURCES[source][1]["stage"]):
        limit = 0.0
    assert after.report["losses"] == pytest.approx(before.report["after"], rel=limit, abs=0)
    if "bf16" not in settings:
        assert after.report["scaling"] == before.report["scaling"]
    assert [group["weight_decay"] for group in after.report["groups"]] == [0.1, 0.0]


@pytest.mark.parametrize(
    ("ranks", "settings"), [(2, {"bf16": True}), (4, {"fp16": FP16, "zero": HPZ})]
)
def test_whole_tensors_are_those_of_deepspeed(
    jobs: Jobs, tmp_path: Path, ranks: int, settings: dict[str, Any]
) -> None:
    place = tmp_path / "truth"
    told = {**settings, "save": str(place), "truth": str(tmp_path / "truth.pt")}
    job = jobs.launch(ranks, stage=3, **told)
    assert len(job.truth) > 10
    with ZeroSource(place) as source:
        found = read_all(source)
        for name, value in job.truth.items():
            parameter, _, key = name.rpartition(".")
            fqn = f"model.{name}"
            if key in ("exp_avg", "exp_avg_sq"):
                fqn = f"optimizer.state.model.{parameter}.{key}"
            assert found[fqn] == value.numpy().tobytes(), fqn


def test_a_universal_directory_of_deepspeed_s_tool_is_read(jobs: Jobs, deepspeed: Run) -> None:
    jobs.saved("three", SOURCES["three"][0], **SOURCES["three"][1])
    tag = jobs.folder / "three" / f"global_step{SAVED}"
    joined = tag.with_name(f"{tag.name}_universal")
    deepspeed(
        *("python", "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(tag)),
        *("--output_folder", str(joined), "--num_extract_workers", "1"),
        *("--num_merge_workers", "1"),
    )
    with UniversalSource(joined) as one, ZeroSource(tag) as other:
        assert read_all(one) == read_all(other)


def test_deepspeed_s_tool_refuses_stage_2_and_ours_does_not(
    jobs: Jobs, deepspeed: Run, tmp_path: Path
) -> None:
    """DeepSpeed#5430: it wants metadata that no ordinary run saves."""
    jobs.saved("two", SOURCES["two"][0], **SOURCES["two"][1])
    tag = jobs.folder / "two" / f"global_step{SAVED}"
    with pytest.raises(AssertionError, match="universal_checkpoint_info"):
        deepspeed(
            *("python", "-m", "deepspeed.checkpoint.ds_to_universal"),
            *("--input_folder", str(tag), "--output_folder", str(tmp_path / "theirs")),
        )
    assert main(["convert", str(tag), str(tmp_path / "ours"), "--to", "ds-universal"]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "runs")]) == 0
    with CheckpointSource.open(tmp_path / "runs") as back, ZeroSource(tag) as source:
        assert read_all(back) == read_all(source)
