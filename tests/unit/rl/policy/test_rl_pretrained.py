"""A transformers model samples, trains and samples again like the built-in small one."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch

from holdfast.adapters.rl.config import RLConfig, preset
from holdfast.adapters.rl.loss.ppo import target_logprobs
from holdfast.adapters.rl.policy.policy import full_tensors, parameter_names
from holdfast.adapters.rl.rollout.engine import Engine
from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory
from holdfast.adapters.rl.weights.initial import build_policy
from holdfast.elastic.errors import ConfigError

pytest.importorskip("transformers")
from pretrained_models import ARCHITECTURES, END, saved

torch.set_num_threads(1)


def config_of(architecture: str) -> RLConfig:
    return msgspec.structs.replace(preset("tiny"), pretrained=saved(architecture))


def make_engine(config: RLConfig, *, pinned: bool = True) -> Engine:
    engine = Engine(
        policy=build_policy(config), limits=config.limits, slots=4, seed=1, pinned=pinned
    )
    engine.load(full_tensors(build_policy(config)), version=1, generation=1)
    return engine


def drain(engine: Engine, work: list[Trajectory]) -> dict[SampleId, Trajectory]:
    waiting, done = list(work), dict[SampleId, Trajectory]()
    while waiting or not engine.idle:
        while waiting and engine.free:
            engine.put(waiting.pop(0))
        done |= {trajectory.key: trajectory for trajectory in engine.tick()}
    return done


def prompts(config: RLConfig) -> list[Trajectory]:
    texts = ["abc>", "hello>", "q>", "zebra>"]
    return [
        Trajectory(ordinal=ordinal, sample=sample, prompt=config.tokenizer.encode(text))
        for ordinal, text in enumerate(texts)
        for sample in range(3)
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sample_does_not_depend_on_slot_neighbours_or_interruptions(architecture: str) -> None:
    config = config_of(architecture)
    work = prompts(config)
    together = drain(make_engine(config), work)
    shuffled = drain(make_engine(config), random.Random(1).sample(work, len(work)))
    halves = [trajectory.first(2) for trajectory in together.values()]
    continued = drain(make_engine(config), [t for t in halves if not config.limits.finished(t)])
    assert together == shuffled
    assert all(together[key] == trajectory for key, trajectory in continued.items())
    assert len({t.tokens for t in together.values()}) > 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_trainer_sees_the_log_probabilities_that_were_recorded(architecture: str) -> None:
    config = config_of(architecture)
    policy = build_policy(config)
    for trajectory in drain(make_engine(config), prompts(config)).values():
        tokens = torch.tensor([trajectory.prompt + trajectory.tokens])
        logprobs = target_logprobs(policy(tokens), tokens)[0, len(trajectory.prompt) - 1 :]
        assert logprobs.tolist() == pytest.approx(trajectory.logprobs, abs=1e-5)


def test_tied_weights_are_one_tensor_and_filled_as_one() -> None:
    config = config_of("qwen3")
    policy = build_policy(config)
    names = parameter_names(policy)
    assert "lm.model.embed_tokens.weight" in names
    assert not any("lm_head" in name for name in names)
    assert len(policy.layers()) == 2


def test_text_goes_through_the_tokenizer_and_back() -> None:
    tokenizer = config_of("llama").tokenizer
    assert tokenizer.encode("ab>") == (97, 98, 62)
    assert tokenizer.decode((97, 98)) == "ab"
    assert (tokenizer.end, tokenizer.size) == (END, 128)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    config = msgspec.structs.replace(preset("tiny"), pretrained=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        build_policy(config)
    (tmp_path / "empty").mkdir()
    config = msgspec.structs.replace(config, pretrained=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="empty: "):
        build_policy(config)


def test_a_context_beyond_what_the_model_takes_is_refused() -> None:
    config = config_of("llama")
    long = msgspec.structs.replace(config.model, context=65)
    with pytest.raises(ConfigError, match="takes 64 tokens, context is 65"):
        build_policy(msgspec.structs.replace(config, model=long))
