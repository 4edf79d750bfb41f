"""Feeding many tokens at once leaves the same cache as feeding them one by one."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from holdfast.adapters.rl.config import RLConfig, preset
from holdfast.adapters.rl.policy.policy import Policy, full_tensors
from holdfast.adapters.rl.rollout.engine import Engine
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.adapters.rl.weights.initial import build_policy

torch.set_num_threads(1)
TOLERANCE = 1e-5
SLOTS = 5


@pytest.fixture(params=["tiny", "quick", "llama", "qwen3"])
def config(request: pytest.FixtureRequest) -> RLConfig:
    """A small model of our own, or one of transformers."""
    name = str(request.param)
    if name in ("tiny", "quick"):
        return preset(name)
    pytest.importorskip("transformers")
    from pretrained_models import saved

    return msgspec.structs.replace(preset("tiny"), pretrained=saved(name))


def one_by_one(policy: Policy, texts: dict[int, list[int]]) -> Tensor:
    """Return the logits behind the last token of each slot."""
    cache, last = policy.new_cache(SLOTS), torch.zeros(0)
    logits = {}
    for at in range(max(map(len, texts.values()))):
        tokens = torch.zeros(SLOTS, dtype=torch.long)
        for slot, text in texts.items():
            tokens[slot] = text[min(at, len(text) - 1)]
        positions = torch.tensor([min(at, len(texts.get(s, "x")) - 1) for s in range(SLOTS)])
        last = policy.decode(tokens, positions, cache)
        for slot, text in texts.items():
            if at == len(text) - 1:
                logits[slot] = last[slot]
    return torch.stack([logits[slot] for slot in texts])


def test_what_follows_is_the_same(config: RLConfig) -> None:
    policy = build_policy(config).eval()
    texts = {3: [5, 9, 7, 11], 0: [4, 8], 4: [6, 5, 9, 3, 7, 8]}
    cache = policy.new_cache(SLOTS)
    padded = torch.zeros(len(texts), 5, dtype=torch.long)
    for line, text in zip(padded, texts.values(), strict=True):
        line[: len(text) - 1] = torch.tensor(text[:-1])
    policy.prefill(padded, torch.tensor([*texts]), cache)
    tokens, positions = torch.zeros(SLOTS, dtype=torch.long), torch.zeros(SLOTS, dtype=torch.long)
    for slot, text in texts.items():
        tokens[slot], positions[slot] = text[-1], len(text) - 1
    found = policy.decode(tokens, positions, cache)[torch.tensor([*texts])]
    torch.testing.assert_close(found, one_by_one(policy, texts), atol=TOLERANCE, rtol=0)


def test_an_engine_that_may_change_weights_feeds_all_but_the_newest_token_at_once(
    config: RLConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = build_policy(config)
    weights = full_tensors(build_policy(config))
    engine = Engine(policy=policy, limits=config.limits, slots=SLOTS, seed=1, pinned=False)
    engine.load(weights, version=1, generation=1)
    fed: list[tuple[int, ...]] = []
    real = policy.prefill

    def prefill(tokens: Tensor, slots: Tensor, cache: object) -> None:
        fed.append(tuple(tokens.shape))
        real(tokens, slots, cache)

    monkeypatch.setattr(policy, "prefill", prefill)
    prompts = [config.tokenizer.encode(text) for text in ("abc>", "hello>")]
    for ordinal, prompt in enumerate(prompts):
        engine.put(Trajectory(ordinal=ordinal, sample=0, prompt=prompt))
    longest = max(map(len, prompts))
    first = engine.tick()
    assert all(count == 1 for count in engine.progress().values()), "the first tick samples"
    assert fed == [(2, longest - 1)]
    other = {name: tensor * 0.5 for name, tensor in weights.items()}
    engine.load(other, version=2, generation=1)
    running = len(engine.running())
    first += engine.tick()
    assert fed[1:] == [(running, longest)] * (running > 0)
    for trajectory in (*engine.running(), *first):
        tokens = torch.tensor([*trajectory.prompt, *trajectory.tokens])
        versions = trajectory.token_versions
        for version, tensors in ((1, weights), (2, other)):
            judge = build_policy(config).eval()
            with torch.no_grad():
                for name, parameter in judge.named_parameters():
                    parameter.copy_(tensors[name])
                logprobs = torch.log_softmax(judge(tokens[None])[0].float(), -1)
            for at, (token, by) in enumerate(zip(trajectory.tokens, versions, strict=True)):
                if by == version:
                    place = len(trajectory.prompt) + at - 1
                    expected = logprobs[place, token].item()
                    assert trajectory.logprobs[at] == pytest.approx(expected, abs=TOLERANCE)
