"""Policies take the job's settings where they have none; what cannot work is refused by name."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.adapters.rl.config import RLConfig, preset
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.ledger.plan import Mode
from holdfast.adapters.rl.loss.ppo import LossConfig
from holdfast.adapters.rl.policy.lora import LoraConfig
from holdfast.adapters.rl.policy.settings import PolicyConfig, StartWeights

REVIEWED = EnvironmentConfig(factory="reviewed")
START = StartWeights(checkpoint="runs/one", step=4)


def team(**policies: PolicyConfig) -> RLConfig:
    return msgspec.structs.replace(preset("tiny"), environment=REVIEWED, policies=policies)


def test_a_job_without_policies_has_one_that_is_the_job_itself() -> None:
    config = preset("tiny")
    assert config.by_policy == {"": config}
    assert not config.frozen


def test_a_policy_takes_the_settings_of_the_job_and_a_seed_of_its_own() -> None:
    config = msgspec.structs.replace(
        team(solver=PolicyConfig(), critic=PolicyConfig(lr=0.5, loss=LossConfig(clip_low=0.1))),
        warm_start="warm",
        seed=7,
    )
    solver, critic = config.by_policy.values()
    assert solver == msgspec.structs.replace(config, policies={})
    assert (critic.lr, critic.loss.clip_low, critic.seed) == (0.5, 0.1, 8)
    assert (critic.warm_start, critic.max_norm) == ("warm", config.max_norm)


def test_only_a_policy_of_the_jobs_model_has_its_warm_start() -> None:
    larger = msgspec.structs.replace(preset("tiny").model, layers=2)
    config = msgspec.structs.replace(
        team(
            one=PolicyConfig(),
            other=PolicyConfig(model=larger),
            grown=PolicyConfig(start=START),
            own=PolicyConfig(model=larger, warm_start="own"),
        ),
        warm_start="warm",
    )
    warm = {name: each.warm_start for name, each in config.by_policy.items()}
    assert warm == {"one": "warm", "other": None, "grown": None, "own": "own"}


def test_a_frozen_policy_has_no_adapters_of_the_job() -> None:
    config = msgspec.structs.replace(
        team(one=PolicyConfig(), old=PolicyConfig(frozen=True)), lora=LoraConfig(rank=2)
    )
    assert {name: each.lora for name, each in config.by_policy.items()} == {
        "one": LoraConfig(rank=2),
        "old": None,
    }
    assert config.frozen == {"old"}


def test_versions_are_kept_for_any_policy_that_recomputes() -> None:
    recomputed = PolicyConfig(loss=LossConfig(proximal="recomputed"))
    config = msgspec.structs.replace(
        team(one=PolicyConfig(), other=recomputed), mode=Mode.BOUNDED, checkpoint="root"
    )
    assert config.retained == config.eta
    alone = team(one=PolicyConfig(), other=PolicyConfig())
    assert msgspec.structs.replace(alone, mode=Mode.BOUNDED, checkpoint="root").retained == 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ('"policies": {"a": {}, "b": {}}', "without an environment only the first one speaks"),
        ('"policies": {"a": {"frozen": true}, "b": {}}', "without an environment only the first"),
        ('ENV, "policies": {"a": {"frozen": true}}', "all of them are frozen"),
        ('ENV, "policies": {"A": {}}', "'A' cannot be a name"),
        ('ENV, "policies": {"train": {}}', "'train' cannot be a name"),
        ('ENV, "policies": {"a": {"frozen": true, "lr": 1}, "b": {}}', "a frozen policy has no lr"),
        ('ENV, "policies": {"a": {"trainers": 2}}', "`trainers`"),
        ('ENV, "policies": {"a": {"lr": "x"}}', "Expected .float . null."),
        ('ENV, "policies": {"a": {"model": {"context": 32}}}', "a has a context of 32"),
        ('ENV, "policies": {"a": {"pretrained": "m"}}', "set pretrained for the job"),
        ('ENV, "policies": {"a": {"start": {"checkpoint": "c"}}}', "`step`"),
        (
            'ENV, "policies": {"a": {"warm_start": "w", "start": {"checkpoint": "c", "step": 1}}}',
            "start and warm_start both name weights",
        ),
        ('ENV, "start": {"checkpoint": "c", "step": 1}, "policies": {"a": {}}', "one of the polic"),
        ('ENV, "length": {"per_token": 0.1}, "policies": {"a": {}}', "has tokens of each"),
        (
            'ENV, "scheduling": {"skip_equal": 3}, "policies": {"a": {}}',
            "for one policy may teach another; set it to null",
        ),
        (
            '"share": {"meet": "m", "name": "n", "own": 6, "others": 2}, "policies": {"a": {}}',
            "share: samples of several policies are not shared",
        ),
    ],
)
def test_policies_that_cannot_work_are_refused_by_name(changes: str, complaint: str) -> None:
    text = "{" + changes.replace("ENV", '"environment": {"factory": "reviewed"}') + "}"
    with pytest.raises(msgspec.ValidationError, match=complaint):
        msgspec.json.decode(text, type=RLConfig)
