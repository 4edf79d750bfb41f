"""A row's log-probabilities are recomputed under the versions that sampled it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
import torch
from torch import Tensor

from holdfast.adapters.rl.config import preset
from holdfast.adapters.rl.loss.batch import collate
from holdfast.adapters.rl.policy.model import build_model
from holdfast.adapters.rl.policy.policy import full_tensors
from holdfast.adapters.rl.rollout.engine import Engine
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.adapters.rl.training.recheck import Recheck, row_at
from holdfast.adapters.rl.weights.initial import build_policy

CONFIG = preset("tiny")


def weights_of(version: int) -> Mapping[str, Tensor]:
    return full_tensors(build_model(CONFIG.model, seed=version))


@pytest.fixture(scope="module")
def sampled() -> list[Trajectory]:
    """Three answers by version 1 and, from their second token on, version 2."""
    torch.set_num_threads(1)
    engine = Engine(
        policy=build_policy(CONFIG), limits=CONFIG.limits, slots=4, seed=0, pinned=False
    )
    engine.load(weights_of(1), version=1, generation=1)
    for ordinal in range(3):
        prompt = CONFIG.tokenizer.encode(f"ab{ordinal}>")
        engine.put(Trajectory(ordinal=ordinal, sample=0, prompt=prompt))
    done: list[Trajectory] = []
    while min(engine.progress().values(), default=1) < 1:
        done += engine.tick()
    engine.load(weights_of(2), version=2, generation=1)
    while not engine.idle:
        done += engine.tick()
    return sorted(done, key=lambda each: each.key)


def difference(samples: list[Trajectory], row: int) -> float:
    batch = collate(samples, torch.zeros(len(samples)), rows=4, length=CONFIG.model.context)
    return Recheck(lambda: build_policy(CONFIG), weights_of).difference(batch, row)


def test_what_was_recorded_is_what_its_versions_say(sampled: list[Trajectory]) -> None:
    assert any(len(each.versions) == 2 for each in sampled)
    assert max(difference(sampled, row) for row in range(3)) < 1e-5
    assert difference(sampled, 3) == 0, "a row without a sample"


def test_a_log_probability_that_was_changed_shows(sampled: list[Trajectory]) -> None:
    first = sampled[0]
    wrong = (*first.logprobs[:-1], first.logprobs[-1] - 0.01)
    samples = [msgspec.structs.replace(first, logprobs=wrong), *sampled[1:]]
    assert difference(samples, 0) == pytest.approx(0.01, abs=1e-4)
    assert difference(samples, 1) < 1e-5


def test_a_version_that_did_not_sample_it_shows(sampled: list[Trajectory]) -> None:
    stamp = sampled[0].stamps[0]
    other = msgspec.structs.replace(stamp, version=7, count=len(sampled[0].tokens))
    assert difference([msgspec.structs.replace(sampled[0], stamps=(other,))], 0) > 1e-3


def test_rows_take_turns() -> None:
    assert [row_at(step, every=2, rows=3) for step in range(0, 8, 2)] == [0, 1, 2, 0]
    assert row_at(1, every=2, rows=3) is None
    assert row_at(0, every=0, rows=3) is None
    assert row_at(0, every=1, rows=0) is None
