"""Losses, references and skipped groups with real processes: what is killed does not show."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jobs import hurt
from rl_jobs import alone, rl_job

from holdfast.adapters.rl.config import RLConfig, WarmStart, preset
from holdfast.adapters.rl.ledger.checker import CheckConfig
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.loss.divergence import KLConfig
from holdfast.adapters.rl.loss.penalties import LengthPenalty
from holdfast.adapters.rl.loss.ppo import LossConfig
from holdfast.adapters.rl.weights import warm_up

ALIKE = ("final_hash", "reward", "heldout")
KINDS: dict[str, dict[str, Any]] = {
    "gspo with a reference that is renewed, groups passed over, int8": {
        "loss": LossConfig(
            objective="gspo", proximal="behavior", kl=KLConfig(weight=0.05, renew_every=3)
        ),
        "length": LengthPenalty(overlong_tokens=2),  # most answers earn only that
        "scheduling": Scheduling(skip_equal=50),
        "rollout_precision": "int8",
    },
    "cispo with a reference as reward and penalties for length": {
        "loss": LossConfig(
            objective="cispo", proximal="ewma", kl=KLConfig(weight=0.05, as_reward=True)
        ),
        "length": LengthPenalty(overlong_tokens=4, per_token=0.01),
    },
    "icepop of int4 against the trainer's own": {
        "loss": LossConfig(correction="icepop", proximal="recomputed"),
        "rollout_precision": "int4",
    },
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RLConfig:
    warm_start = str(tmp_path_factory.mktemp("warm"))
    config = msgspec.structs.replace(
        preset("tiny"), steps=6, lr=3e-4, exact_weight=1.0, warm_start=warm_start
    )
    assert warm_up.prepare(config)
    return config


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_job_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, config: RLConfig, kind: str
) -> None:
    config = msgspec.structs.replace(config, **KINDS[kind])
    (tmp_path / "alone").mkdir()
    expected = alone(tmp_path / "alone", config)
    check = CheckConfig(recompute_every=1, fatal=True)
    with rl_job(tmp_path, msgspec.structs.replace(config, check=check)) as job:
        job.await_step(2)
        hurt(job.worker("rollout/0"))
        job.await_event(lambda e: e["kind"] == "rollout_recovered")
        hurt(job.worker(job.events("proposed")[-1]["ranks"][0]), signal.SIGKILL)
        job.generation(2)
        outcome = job.finish()
        assert outcome.ok, outcome.message
        logged = [event["values"] for event in job.events("metric")]
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert {key: result[key] for key in ALIKE} == {key: expected[key] for key in ALIKE}
    assert result["ledger"]["ok"], result["ledger"]
    assert result["ledger"]["ordinals"]["trained"] == config.steps * config.groups
    assert result["ledger"]["groups_skipped"] == expected["ledger"]["groups_skipped"]
    trained = [values for values in logged if "reward" in values]
    assert trained
    assert all(("divergence" in values) == (config.loss.kl is not None) for values in trained)


@pytest.mark.exhaustive
def test_a_job_that_earns_nothing_stops_by_name(tmp_path: Path, config: RLConfig) -> None:
    config = msgspec.structs.replace(
        config, warm_start=None, warm=WarmStart(steps=0), scheduling=Scheduling(skip_equal=2)
    )
    with rl_job(tmp_path, config) as job:
        outcome = job.finish()
        assert not outcome.ok
        assert "passed over 8 groups, which skip_equal=2 allows" in outcome.message
        assert max(event["attempt"] for event in job.events("worker_started")) == 1
