"""Several policies are one module by name; frozen ones have no parameter, and a digest."""

from __future__ import annotations

import msgspec
import pytest
import torch

from holdfast.adapters.rl.config import RLConfig, preset
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.policy.lora import LoraConfig
from holdfast.adapters.rl.policy.model import weights_hash
from holdfast.adapters.rl.policy.policy import full_tensors, parameter_names
from holdfast.adapters.rl.policy.settings import PolicyConfig
from holdfast.adapters.rl.policy.team import joined
from holdfast.adapters.rl.rollout.speakers import engines_of, judges_of
from holdfast.adapters.rl.weights.initial import build_policy
from holdfast.adapters.rl.weights.setup import Policies
from holdfast.elastic.errors import JobFailedError

torch.set_num_threads(1)


def team(**policies: PolicyConfig) -> RLConfig:
    environment = EnvironmentConfig(factory="reviewed")
    return msgspec.structs.replace(preset("tiny"), environment=environment, policies=policies)


TEAM = team(solver=PolicyConfig(), critic=PolicyConfig(), old=PolicyConfig(frozen=True))


def test_the_only_policy_of_a_job_is_its_module() -> None:
    config = preset("tiny")
    policies = Policies(config).each()
    assert [*policies] == [""]
    assert joined(policies) is policies[""]
    assert weights_hash(full_tensors(policies[""])) == weights_hash(
        full_tensors(build_policy(config))
    )


def test_several_policies_have_their_names_before_their_parameters() -> None:
    policies = Policies(TEAM).each()
    own = parameter_names(build_policy(TEAM))
    assert parameter_names(joined(policies)) == [
        f"{name}.{each}" for name in ("solver", "critic") for each in own
    ]
    hashes = {weights_hash(full_tensors(policies[name])) for name in ("solver", "critic")}
    assert len(hashes) == 2, "each is built from a seed of its own"


def test_a_frozen_policy_has_no_parameter_and_all_processes_compare_it() -> None:
    policies, others = Policies(TEAM), Policies(TEAM)
    assert parameter_names(policies.each()["old"]) == []
    assert policies.frozen == others.frozen is not None
    assert policies.frozen_weights is not None
    assert parameter_names(policies.frozen_weights) == [
        f"old.{name}" for name in parameter_names(build_policy(TEAM))
    ]
    without = team(solver=PolicyConfig(), critic=PolicyConfig())
    assert Policies(without).frozen is None
    lora = team(solver=PolicyConfig(lora=LoraConfig(rank=2)), old=PolicyConfig(frozen=True))
    assert Policies(lora).frozen not in (None, policies.frozen)


def test_frozen_policies_made_by_one_process_share_their_memory() -> None:
    policies = Policies(TEAM)
    one, other = (dict(policies.each()["old"].named_buffers()) for _ in range(2))
    assert all(one[name].data_ptr() == other[name].data_ptr() for name in one)


def test_each_engine_takes_the_weights_of_its_policy_and_leaves_a_frozen_one_alone() -> None:
    policies, trained = Policies(TEAM).each(), Policies(TEAM).each()
    old = policies["old"](torch.ones(1, 4, dtype=torch.long))
    with torch.no_grad():
        for parameter in joined(trained).parameters():
            parameter.add_(1.0)
    for engine in engines_of(TEAM, policies):
        engine.load(full_tensors(joined(trained)), version=3, generation=1)
    for name in ("solver", "critic"):
        assert weights_hash(full_tensors(policies[name])) == weights_hash(
            full_tensors(trained[name])
        )
    assert torch.equal(policies["old"](torch.ones(1, 4, dtype=torch.long)), old)


def test_without_an_environment_only_the_first_policy_has_an_engine() -> None:
    config = msgspec.structs.replace(
        preset("tiny"), policies={"one": PolicyConfig(), "old": PolicyConfig(frozen=True)}
    )
    (engine,) = engines_of(config, Policies(config).each())
    assert engine.prefix == "one."


def test_a_frozen_policy_says_how_likely_a_text_is() -> None:
    policies = Policies(TEAM).each()
    judges = judges_of(TEAM, policies)
    assert [*judges] == ["old"]
    found = judges["old"].logprobs("ab>", "ba", ended=True)
    tokens = torch.tensor([[*b"ab>ba", TEAM.tokenizer.end]])
    table = torch.log_softmax(policies["old"](tokens)[0], -1)
    wanted = [table[at, tokens[0, at + 1]].item() for at in range(2, 5)]
    assert found == pytest.approx(wanted)
    assert judges["old"].logprobs("ab>", "ba") == found[:2]


@pytest.mark.parametrize(("text", "answer"), [("", "a"), ("a" * 10, "b" * 10)])
def test_a_frozen_policy_refuses_what_it_cannot_read(text: str, answer: str) -> None:
    judge = judges_of(TEAM, Policies(TEAM).each())["old"]
    with pytest.raises(JobFailedError, match="policy old was asked for"):
        judge.logprobs(text, answer)
