"""Trainers that share a layer's heads: a loss removes their row for a time and changes no bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobs import PATIENT, PRELOAD, Job, hurt, launched
from rl_jobs import MAIN

from holdfast.adapters.rl.config import RLConfig, preset, save_config
from holdfast.adapters.rl.loss.ppo import LossConfig
from holdfast.adapters.rl.weights import warm_up
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec


def launch(directory: Path, config: RLConfig, *, trainers: int) -> LaunchConfig:
    """Return a job of pairs of trainers, each pair on a node, and one rollout worker."""
    directory.mkdir()
    save_config(config, directory / "config.json")
    words = ("--config", str(directory / "config.json"), "--result", str(directory / "result.json"))
    slots = [{"trainer": 2, "rollout": 1}, *[{"trainer": 2}] * (trainers // 2 - 1)]
    return LaunchConfig(
        command=(*MAIN, *words),
        nodes=tuple(
            NodeSpec(name=f"n{at}", domain=f"n{at}", slots=each) for at, each in enumerate(slots)
        ),
        wanted={"trainer": trainers, "rollout": 1},
        run_dir=directory / "run",
        timing=PATIENT,
        preload=PRELOAD,
        capture_output=True,
    )


def outcome_of(job: Job, directory: Path) -> dict[str, Any]:
    outcome = job.finish()
    assert outcome.ok, outcome.message
    result: dict[str, Any] = json.loads((directory / "result.json").read_bytes())
    assert result["ledger"]["ok"], result["ledger"]
    return result


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_row_of_two_that_is_lost_and_comes_back_does_not_show_in_the_weights(
    tmp_path: Path,
) -> None:
    loss = LossConfig(baseline="minimum_variance", ess_lr=True)
    config = msgspec.structs.replace(
        preset("tiny"), steps=12, tp=2, loss=loss, warm_start=str(tmp_path / "warm")
    )
    warm_up.prepare(config)
    hurt_place, calm_place, hold = tmp_path / "hurt", tmp_path / "calm", tmp_path / "hold"
    config = msgspec.structs.replace(config, hold=str(hold))
    with launched(launch(hurt_place, config, trainers=4)) as job:
        job.world_of(4)
        job.await_step(2)
        hurt(job.worker("trainer/1"), signal.SIGKILL)
        one_row = job.world_of(2, after=len(job.history))
        hold.touch()
        job.world_of(4, after=job.history.index(one_row))
        hold.unlink()
        found = outcome_of(job, hurt_place)
        last = max(job.events("step"), key=lambda event: event["step"])
        assert last["generation"] >= 3, "two rows again made the last step"
    with launched(launch(calm_place, config, trainers=2)) as job:
        calm = outcome_of(job, calm_place)
        assert {len(event["ranks"]) for event in job.events("proposed")} == {2}
    assert found["final_hash"] == calm["final_hash"]
    assert (found["reward"], found["heldout"]) == (calm["reward"], calm["heldout"])
