"""Adapters: frozen weights are not part of the state, the start changes nothing, bits are equal."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from pretrained_models import saved
from torch import nn

from holdfast.adapters.rl.config import RLConfig, WarmStart, preset
from holdfast.adapters.rl.loss.ppo import target_logprobs
from holdfast.adapters.rl.policy.lora import LoraConfig, LoraLinear
from holdfast.adapters.rl.policy.policy import Policy, full_tensors, parameter_names
from holdfast.adapters.rl.rollout.engine import Engine
from holdfast.adapters.rl.rollout.worker import RolloutWorker
from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory
from holdfast.adapters.rl.weights import warm_up
from holdfast.adapters.rl.weights.beginning import load_warm_start
from holdfast.adapters.rl.weights.initial import build_policy
from holdfast.adapters.rl.weights.setup import Policies, require_same
from holdfast.ckpt.state.flatten import flatten
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.errors import ConfigError

torch.set_num_threads(1)
MODELS = ["own", *(["llama", "qwen3"] if importlib.util.find_spec("transformers") else [])]


def config_of(model: str, **lora: Any) -> RLConfig:
    config = msgspec.structs.replace(preset("tiny"), lora=LoraConfig(**lora))
    if model == "own":
        return config
    return msgspec.structs.replace(config, pretrained=saved(model))


def base(config: RLConfig) -> Policy:
    return build_policy(msgspec.structs.replace(config, lora=None))


def changed(config: RLConfig) -> dict[str, torch.Tensor]:
    """Return adapters that change something."""
    generator = torch.Generator().manual_seed(4)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in full_tensors(Policies(config).build()).items()
    }


@pytest.mark.parametrize("model", MODELS)
def test_a_policy_with_new_adapters_says_what_the_frozen_one_says(model: str) -> None:
    config = config_of(model)
    tokens = torch.arange(40).reshape(4, 10) + 60
    assert torch.equal(Policies(config).build()(tokens), base(config)(tokens))


@pytest.mark.parametrize("model", MODELS)
def test_only_adapters_are_state_and_what_is_frozen_keeps_its_names(model: str) -> None:
    config = config_of(model, rank=4)
    policy = Policies(config).build()
    names = parameter_names(policy)
    assert names
    assert all(name.rsplit(".", 1)[1] in ("lora_down", "lora_up") for name in names)
    assert [*flatten({"model": policy}).tensors] == [f"model.{name}" for name in names]
    frozen = dict(policy.named_buffers())
    for name, tensor in base(config).named_parameters():
        assert torch.equal(frozen[name], tensor)
    trained = sum(parameter.numel() for parameter in policy.parameters())
    assert trained < 0.5 * sum(tensor.numel() for tensor in frozen.values())


@pytest.mark.parametrize("model", MODELS)
def test_policies_are_equal_and_share_what_is_frozen_and_nothing_else(model: str) -> None:
    config = config_of(model)
    policies, others = Policies(config), Policies(config)
    one, two, three = policies.build(), policies.build(), others.build()
    assert policies.frozen == others.frozen
    for (name, a), b, c in zip(
        one.named_parameters(), two.parameters(), three.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert torch.equal(a, c), name
        assert a.data_ptr() != b.data_ptr(), name
    for a, b in zip(one.buffers(), two.buffers(), strict=True):
        assert a is b


def test_the_digest_is_of_what_is_frozen() -> None:
    config = config_of("own")
    other = msgspec.structs.replace(config, seed=config.seed + 1)
    assert Policies(config).frozen != Policies(other).frozen
    assert Policies(preset("tiny")).frozen is None


def test_a_warm_start_is_what_is_frozen(tmp_path: Path) -> None:
    config = msgspec.structs.replace(
        config_of("own"), warm=WarmStart(steps=2), warm_start=str(tmp_path / "warm")
    )
    warm_up.prepare(config)
    warmed = base(config)
    load_warm_start(warmed, str(tmp_path / "warm"))
    tokens = torch.arange(20).reshape(2, 10) + 60
    policies = Policies(config)
    assert torch.equal(policies.build()(tokens), warmed(tokens))
    assert policies.frozen != Policies(config_of("own")).frozen


def test_a_layer_with_an_adapter_is_the_layer_with_the_product_added() -> None:
    frozen = nn.Linear(6, 5)
    layer = LoraLinear(frozen, rank=2, alpha=3.0)
    with torch.no_grad():
        layer.lora_up.normal_()
    x = torch.randn(7, 6)
    merged = frozen.weight + 1.5 * layer.lora_up @ layer.lora_down
    torch.testing.assert_close(layer(x), nn.functional.linear(x, merged, frozen.bias))


def test_training_changes_adapters_alone() -> None:
    config = config_of("own")
    policies = Policies(config)
    policy, untouched = policies.build(), base(config)
    tokens = torch.arange(40).reshape(4, 10) + 60
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        (-target_logprobs(policy(tokens), tokens).mean()).backward()
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    frozen = dict(policy.named_buffers())
    for name, tensor in untouched.named_parameters():
        assert torch.equal(frozen[name], tensor)


def test_targets_are_chosen_by_name_and_a_wrong_one_is_named() -> None:
    names = parameter_names(Policies(config_of("own", targets=("qkv",))).build())
    assert names == ["blocks.0.qkv.lora_down", "blocks.0.qkv.lora_up"]
    with pytest.raises(ConfigError, match=r"called \['q_proj'\]; the policy has \['attention_out'"):
        Policies(config_of("own", targets=("qkv", "q_proj")))


@pytest.mark.parametrize(("field", "value"), [("rank", 0), ("alpha", 0.0)])
def test_settings_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"{field} is 0"):
        msgspec.convert({field: value}, LoraConfig)


# -- sampling ---------------------------------------------------------------------------------


def make_engine(config: RLConfig) -> Engine:
    policy = Policies(config).build()
    engine = Engine(policy=policy, limits=config.limits, slots=4, seed=1)
    engine.load(changed(config), version=1, generation=1)
    return engine


def drain(engine: Engine, work: list[Trajectory]) -> dict[SampleId, Trajectory]:
    waiting, done = list(work), dict[SampleId, Trajectory]()
    while waiting or not engine.idle:
        while waiting and engine.free:
            engine.put(waiting.pop(0))
        done |= {trajectory.key: trajectory for trajectory in engine.tick()}
    return done


def prompts(config: RLConfig) -> list[Trajectory]:
    return [
        Trajectory(ordinal=ordinal, sample=sample, prompt=config.tokenizer.encode(text))
        for ordinal, text in enumerate(["abc>", "hello>", "q>", "zebra>"])
        for sample in range(3)
    ]


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("model", MODELS)
def test_a_sample_does_not_depend_on_slot_neighbours_or_interruptions(
    model: str, rank: int
) -> None:
    config = config_of(model, rank=rank)
    work = prompts(config)
    together = drain(make_engine(config), work)
    shuffled = drain(make_engine(config), random.Random(1).sample(work, len(work)))
    halves = [trajectory.first(2) for trajectory in together.values()]
    continued = drain(make_engine(config), [t for t in halves if not config.limits.finished(t)])
    assert together == shuffled
    assert all(together[key] == trajectory for key, trajectory in continued.items())


@pytest.mark.parametrize("model", MODELS)
def test_the_trainer_sees_the_log_probabilities_that_were_recorded(model: str) -> None:
    config = config_of(model)
    engine = make_engine(config)
    for trajectory in drain(engine, prompts(config)).values():
        tokens = torch.tensor([trajectory.prompt + trajectory.tokens])
        logprobs = target_logprobs(engine.policy(tokens), tokens)[0, len(trajectory.prompt) - 1 :]
        assert logprobs.tolist() == pytest.approx(trajectory.logprobs, abs=1e-5)


# -- the same base for all --------------------------------------------------------------------


def test_others_with_something_else_frozen_are_refused() -> None:
    require_same(None, here="rank 0", others=None)
    require_same("aa", here="rank 0", others="aa")
    with pytest.raises(ConfigError, match=r"frozen weights of rank 1 have the digest aa.* bb"):
        require_same("aa", here="rank 1", others="bb")


def test_a_rollout_worker_follows_no_leader_with_something_else_frozen() -> None:
    member = SimpleNamespace(info={"rollout": "tcp://127.0.0.1:9", "frozen": "another"})
    record = SimpleNamespace(number=1, members=(member,))
    host = SimpleNamespace(
        node="a",
        seat="rollout/0",
        incarnation="x",
        key=RunKey.new(),
        roster=lambda: SimpleNamespace(generation=record),
    )
    worker = RolloutWorker(cast("Any", host), config_of("own"), stopped=lambda: False)
    with pytest.raises(ConfigError, match="frozen weights of rollout/0"):
        worker._follow()
