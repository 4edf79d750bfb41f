"""Weights of low precision: near the policy's own, the same each time, and what was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from exploring import examples
from hypothesis import given, settings
from torch import Tensor, nn

from holdfast.adapters.rl.config import RLConfig, preset
from holdfast.adapters.rl.loss.batch import collate
from holdfast.adapters.rl.policy.model import build_model
from holdfast.adapters.rl.policy.policy import full_tensors
from holdfast.adapters.rl.policy.rounding import Precision, round_weights, rounded
from holdfast.adapters.rl.rollout.engine import Engine
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.adapters.rl.training.recheck import Recheck
from holdfast.adapters.rl.weights.initial import build_policy
from holdfast.elastic.errors import ConfigError

torch.set_num_threads(1)
CONFIG = preset("tiny")
LOW: list[Precision] = [each for each in get_args(Precision) if each != "full"]
ROWS = st.lists(
    st.lists(st.floats(-4, 4, width=16, allow_subnormal=False), min_size=3, max_size=3),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize(("precision", "largest"), [("int8", 127), ("int4", 7)])
@settings(max_examples=examples(60), deadline=None)
@given(rows=ROWS)
def test_every_weight_is_the_nearest_of_evenly_spaced_ones(
    precision: Precision, largest: int, rows: list[list[float]]
) -> None:
    weight = torch.tensor(rows)
    for before, after in zip(rows, rounded(weight, precision).tolist(), strict=True):
        scale = max(map(abs, before)) / largest
        for value, found in zip(before, after, strict=True):
            assert abs(found - value) <= scale / 2 + 1e-6
            assert scale == 0 or abs(found / scale - round(found / scale)) < 1e-3


@settings(max_examples=examples(60), deadline=None)
@given(rows=ROWS)
def test_float8_is_off_by_a_sixteenth_of_a_weight_at_most(rows: list[list[float]]) -> None:
    weight = torch.tensor(rows)
    scale = weight.abs().amax(1, keepdim=True) / 448
    off = (rounded(weight, "float8") - weight).abs()
    assert (off <= weight.abs() / 16 + scale * 2**-9).all()


@pytest.mark.parametrize("precision", LOW)
def test_only_the_linear_layers_of_the_layers_are_rounded_and_the_same_each_time(
    precision: Precision,
) -> None:
    model, again = (build_model(CONFIG.model, seed=3) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in full_tensors(model).items()}
    for each in (model, again):
        round_weights(each, precision)
    changed = {n for n, tensor in full_tensors(model).items() if not tensor.equal(before[n])}
    assert changed == {
        f"blocks.0.{name}.weight" for name in ("qkv", "attention_out", "mlp_in", "mlp_out")
    }
    assert all(tensor.equal(full_tensors(again)[n]) for n, tensor in full_tensors(model).items())


def test_full_precision_changes_nothing() -> None:
    model = build_model(CONFIG.model, seed=3)
    before = {name: tensor.clone() for name, tensor in full_tensors(model).items()}
    round_weights(model, "full")
    assert all(tensor.equal(before[n]) for n, tensor in full_tensors(model).items())


def weights_of(version: int) -> Mapping[str, Tensor]:
    return full_tensors(build_model(CONFIG.model, seed=version))


def sampled(precision: Precision) -> list[Trajectory]:
    engine = Engine(
        policy=build_policy(CONFIG), limits=CONFIG.limits, slots=4, seed=0, precision=precision
    )
    done: list[Trajectory] = []
    for version in (1, 2):  # the second is not rounded on top of the first
        engine.load(weights_of(version), version=version, generation=1)
        for ordinal in range(4):
            prompt = CONFIG.tokenizer.encode(f"ab{ordinal}>")
            engine.put(Trajectory(ordinal=ordinal, sample=version, prompt=prompt))
        while not engine.idle:
            done += engine.tick()
    return sorted(done, key=lambda each: each.key)


@pytest.mark.parametrize("precision", LOW)
def test_what_was_recorded_is_what_the_rounded_weights_say(precision: Precision) -> None:
    samples = sampled(precision)
    assert sampled(precision) == samples
    rows = len(samples)
    batch = collate(samples, torch.zeros(rows), rows=rows, length=CONFIG.model.context)

    def worst(looks_with: Precision) -> float:
        recheck = Recheck(lambda: build_policy(CONFIG), weights_of, precision=looks_with)
        return max(recheck.difference(batch, row) for row in range(rows))

    assert worst(precision) < 1e-5
    assert worst("full") > 1e-4, "the engine and the trainer differ"


def test_a_policy_without_linear_layers_is_refused() -> None:
    policy: Any = build_model(CONFIG.model, seed=0)
    policy.layers = lambda: [nn.LayerNorm(4)]
    with pytest.raises(ConfigError, match="no linear layers to round; set it to 'full'"):
        round_weights(policy, "int8")


def test_adapters_are_refused_with_low_precision() -> None:
    with pytest.raises(msgspec.ValidationError, match="set it to 'full' or lora to null"):
        msgspec.convert({"rollout_precision": "int8", "lora": {}}, RLConfig)
    with pytest.raises(msgspec.ValidationError, match="rollout_precision"):
        msgspec.convert({"rollout_precision": "int3"}, RLConfig)
