"""Ranks of Fabric and of the Trainer that are killed go on in the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

JOB = Path(__file__).with_name("lightning_job.py")
TRAINER_JOB = Path(__file__).with_name("lightning_trainer_job.py")


def told(run: Run, job: Path, folder: Path) -> dict[str, Any]:
    """Run a job in a folder; return its last line."""
    found: dict[str, Any] = json.loads(run("python", str(job), str(folder)).splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def report(lightning: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what all runs of the job said."""
    return told(lightning, JOB, tmp_path_factory.mktemp("fabric"))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_killed_ranks_end_in_the_bits_of_an_undisturbed_run(
    name: str, report: dict[str, Any]
) -> None:
    whole, again = report[f"{name} whole"], report[f"{name} again"]
    assert report[f"{name} killed"] == [None, None]
    assert [(each["begun_at"], each["rest"]) for each in again] == [(6, {"name": "job"})] * 2
    assert [(each["hash"], each["lr"]) for each in again] == [
        (each["hash"], each["lr"]) for each in whole
    ]


def test_one_rank_goes_on_from_two_sharded_ones(report: dict[str, Any]) -> None:
    (alone,) = report["alone"]
    assert alone["begun_at"] == 6
    assert alone["weights"] == pytest.approx(report["fsdp2 whole"][0]["weights"], abs=1e-6)


def test_the_names_have_no_part_of_ddp(report: dict[str, Any]) -> None:
    assert {"model.0.weight", "optimizer.state.model.0.weight.exp_avg"} <= {*report["names"]}
    assert not [name for name in report["names"] if ".module." in name]


def test_calls_without_a_meaning_are_refused_through_fabric_too(report: dict[str, Any]) -> None:
    step, filtered, whole, raw, absent, rest = report["refused"]
    assert "the step is not known" in step
    assert "fabric.save(filter=...)" in filtered
    assert "give the state to fill" in whole
    assert "give the state to fill" in raw
    assert "no checkpoint of step 7" in absent
    assert rest == "{'more': 5}"


@pytest.fixture(scope="module")
def trainers(lightning: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what all runs of the Trainer's job said."""
    return told(lightning, TRAINER_JOB, tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_killed_trainer_ends_in_the_bits_of_an_undisturbed_one(
    name: str, trainers: dict[str, Any]
) -> None:
    whole, again = trainers[f"{name} whole"], trainers[f"{name} again"]
    assert trainers[f"{name} killed"] == [None, None]
    assert [each.pop("begun_at") for each in (*whole, *again)] == [0, 0, 2, 2]
    assert again == whole
    assert whole[0]["kept"] == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]


def test_one_rank_of_a_trainer_goes_on_from_two_sharded_ones(trainers: dict[str, Any]) -> None:
    (alone,) = trainers["alone"]
    whole = trainers["fsdp2 whole"][0]
    assert (alone["begun_at"], alone["step"], alone["lr"]) == (2, 16, whole["lr"])
    assert alone["weights"] == pytest.approx(whole["weights"], abs=1e-6)


def test_a_trainer_is_refused_what_would_come_out_wrong(trainers: dict[str, Any]) -> None:
    refused = trainers["refused"]
    assert "saved inside an epoch" in refused["inside"]
    assert "a store is not supported with the Trainer" in refused["store"]
    assert "changed layers.0.bias" in refused["changed"]
    assert "plugins=AsyncCheckpointIO" in refused["plugin"]
