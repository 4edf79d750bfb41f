"""A policy begins with another's weights from a checkpoint, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from holdfast import ckpt
from holdfast.adapters.rl.config import RLConfig, preset
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.policy.model import weights_hash
from holdfast.adapters.rl.policy.policy import Policy, full_tensors
from holdfast.adapters.rl.policy.settings import PolicyConfig, StartWeights
from holdfast.adapters.rl.weights.beginning import load_beginning
from holdfast.adapters.rl.weights.initial import build_policy
from holdfast.adapters.rl.weights.setup import Policies
from holdfast.elastic.errors import ConfigError

TINY = preset("tiny")


def trained(seed: int) -> Policy:
    return build_policy(msgspec.structs.replace(TINY, seed=seed))


def team(**policies: PolicyConfig) -> RLConfig:
    environment = EnvironmentConfig(factory="reviewed")
    return msgspec.structs.replace(TINY, environment=environment, policies=policies)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the checkpoint of a job of two policies, at two steps."""
    root = str(tmp_path_factory.mktemp("root"))
    for step in (5, 10):
        policies = nn.ModuleDict({"solver": trained(step), "critic": trained(step + 1)})
        ckpt.save(root, {"model": policies}, step=step)
    return root


def test_a_policy_grows_from_another_of_a_job_with_several(root: str) -> None:
    start = StartWeights(checkpoint=root, step=5, policy="critic")
    config = team(solver=PolicyConfig(), grown=PolicyConfig(start=start))
    policies = Policies(config)
    grown = policies.each()["grown"]
    policies.makers["grown"].begin(grown)
    assert weights_hash(full_tensors(grown)) == weights_hash(full_tensors(trained(6)))


def test_the_only_policy_of_a_job_grows_from_the_only_one_of_another(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"model": trained(3)}, step=7)
    start = StartWeights(checkpoint=str(tmp_path), step=7)
    config, policy = msgspec.structs.replace(TINY, start=start), build_policy(TINY)
    load_beginning(policy, config)
    assert weights_hash(full_tensors(policy)) == weights_hash(full_tensors(trained(3)))


def test_a_frozen_policy_is_that_of_the_checkpoint(root: str) -> None:
    start = StartWeights(checkpoint=root, step=10, policy="solver")
    config = team(solver=PolicyConfig(), old=PolicyConfig(start=start, frozen=True))
    tokens = torch.ones(1, 4, dtype=torch.long)
    assert torch.equal(Policies(config).each()["old"](tokens), trained(10)(tokens))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"step": 7}, "no checkpoint of step 7"),
        ({"policy": "judge"}, "no tensor model.judge"),
        ({"policy": ""}, "no tensor model.tokens"),
        ({"checkpoint": "/nowhere"}, "/nowhere"),
    ],
)
def test_weights_that_are_not_there_are_refused(
    root: str, changes: dict[str, object], complaint: str
) -> None:
    start = StartWeights(checkpoint=root, step=5, policy="critic")
    start = msgspec.structs.replace(start, **changes)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_beginning(build_policy(TINY), msgspec.structs.replace(TINY, start=start))
    assert "name a checkpoint that an RL job wrote" in str(caught.value)


def test_weights_of_another_model_are_refused(root: str) -> None:
    start = StartWeights(checkpoint=root, step=5, policy="critic")
    wider = msgspec.structs.replace(TINY.model, width=128)
    config = msgspec.structs.replace(TINY, start=start, model=wider)
    with pytest.raises(ConfigError, match="give both policies the same model"):
        load_beginning(build_policy(config), config)
