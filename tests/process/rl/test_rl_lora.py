"""Adapters in real jobs: small snapshots and pulls, and the same bits under any kill."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import msgspec
import pytest
from jobs import Event, hurt
from lora_bodies import train
from pretrained_models import saved
from ranks import ranks
from rl_jobs import alone, rl_job

from holdfast.adapters.rl.config import RLConfig, WarmStart, preset
from holdfast.adapters.rl.loss.ppo import LossConfig
from holdfast.adapters.rl.policy.lora import LoraConfig
from holdfast.adapters.rl.weights import warm_up
from holdfast.adapters.rl.weights.setup import Policies


def adapted(directory: Path, **changes: object) -> RLConfig:
    """Return a small job that trains adapters upon a warm start."""
    config = msgspec.structs.replace(
        preset("tiny"),
        steps=12,
        warm_start=str(directory / "warm"),
        lora=LoraConfig(rank=4),
        **changes,
    )
    warm_up.prepare(config)
    return config


def most_copied_by_a_step(steps: list[Event]) -> int:
    """Return the bytes of the largest snapshot: a rank tells what all of its came to."""
    most, before = 0, dict[tuple[int, int], int]()
    for event in steps:
        rank = event["generation"], event["rank"]
        most = max(most, event["copied_bytes"] - before.get(rank, event["copied_bytes"]))
        before[rank] = event["copied_bytes"]
    return most


@pytest.mark.timeout(300)
def test_adapters_alone_are_snapshotted_and_pulled_and_kills_do_not_show(tmp_path: Path) -> None:
    config = adapted(tmp_path, loss=LossConfig(proximal="recomputed"))
    policy = Policies(config).build()
    trained = sum(parameter.nbytes for parameter in policy.parameters())
    frozen = sum(tensor.nbytes for tensor in policy.buffers())
    (tmp_path / "alone").mkdir()
    expected = alone(tmp_path / "alone", config)
    with rl_job(tmp_path, config) as job:
        job.await_step(2)
        hurt(job.worker("rollout/0"))
        hurt(job.worker(job.events("proposed")[-1]["ranks"][0]), signal.SIGKILL)
        job.generation(2)
        outcome = job.finish()
        assert outcome.ok, outcome.message
        pulled = {event["bytes"] for event in job.events("weights_pulled")}
        steps = job.events("step")
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert result["final_hash"] == expected["final_hash"]
    assert result["heldout"] == expected["heldout"]
    assert result["ledger"]["ok"], result["ledger"]
    assert max(pulled) == trained, "a pull of what changed alone has less"
    assert 0 < most_copied_by_a_step(steps) < 4 * trained < frozen


@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_more_ranks_than_an_adapter_has_rows_for_train_the_same_adapters(tmp_path: Path) -> None:
    found = []
    for size in (1, 3):
        with ranks(size, train, tmp_path) as running:
            found.append(running.results(timeout_s=250))
    (alone,), together = found
    assert len(set(alone["seen"])) == len(alone["seen"])
    assert alone["retained"] == {2: alone["seen"][1], 1: alone["seen"][0]}
    for result in together:
        assert (result["seen"], result["retained"]) == (alone["seen"], alone["retained"])
    assert any(0 in result["elements"] for result in together), "a rank has none of some"
    columns = zip(*(result["elements"] for result in together), strict=True)
    assert [sum(column) for column in columns] == alone["elements"]


def test_adapters_of_a_model_of_transformers_are_trained(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = msgspec.structs.replace(
        preset("tiny"),
        pretrained=saved("qwen3"),
        warm=WarmStart(steps=0),
        lora=LoraConfig(targets=("q_proj", "v_proj")),
        loss=LossConfig(proximal="ewma", baseline="median"),
        steps=4,
    )
    result = alone(tmp_path, config)
    assert result["ledger"]["ok"], result["ledger"]
    assert (result["steps"], result["staleness_max"]) == (4, 2)
