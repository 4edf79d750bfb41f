"""The loss against a naive version, its division into microbatches, and the batch's packing."""

from __future__ import annotations

import math

import pytest
import torch
from loss_batches import CONFIG, make_batch

from holdfast.adapters.rl.loss.advantages import group_advantages
from holdfast.adapters.rl.loss.batch import TrainingBatch, packed_shape
from holdfast.adapters.rl.loss.ppo import LossConfig, policy_loss, target_logprobs
from holdfast.adapters.rl.policy.model import build_model

torch.set_num_threads(1)


def naive(
    logprobs: torch.Tensor, batch: TrainingBatch, config: LossConfig, anchor: torch.Tensor
) -> float:
    total, count = 0.0, 0
    for row in range(len(batch.tokens)):
        for at in range(batch.mask.shape[1]):
            if batch.mask[row, at] == 0:
                continue
            count += 1
            ratio = math.exp(float(logprobs[row, at] - anchor[row, at]))
            weight = min(
                math.exp(float(anchor[row, at] - batch.behavior[row, at])), config.behavior_cap
            )
            advantage = float(batch.advantages[row])
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            total -= weight * min(ratio * advantage, clipped * advantage)
    return total / count


@pytest.mark.parametrize("moved", [0.0, 0.1, 0.5])
def test_the_loss_is_the_naive_one(moved: float) -> None:
    batch, config = make_batch(), LossConfig()
    torch.manual_seed(0)
    anchor = -torch.rand(batch.behavior.shape) * 2
    logprobs = anchor + moved * torch.randn(anchor.shape)
    loss = policy_loss(
        logprobs, batch, config=config, step=2, scale=1 / batch.token_count, proximal=anchor
    )
    assert float(loss) == pytest.approx(naive(logprobs, batch, config, anchor), abs=1e-5)


def test_microbatches_add_up_to_the_mean_over_the_tokens_of_the_batch() -> None:
    model, batch, parts = build_model(CONFIG.model, seed=1), make_batch(), 4

    def gradient(batches: list[TrainingBatch], scale: float) -> torch.Tensor:
        model.zero_grad()
        for part in batches:
            logprobs = target_logprobs(model(part.tokens), part.tokens)
            policy_loss(logprobs, part, config=LossConfig(), step=2, scale=scale).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = gradient([batch], 1 / batch.token_count)
    pieces = gradient([batch.part(i, of=parts) for i in range(parts)], parts / batch.token_count)
    torch.testing.assert_close(pieces / parts, whole, atol=1e-6, rtol=1e-4)


def test_without_a_proximal_policy_the_gradient_is_the_weighted_policy_gradient() -> None:
    batch = make_batch()
    logprobs = torch.full(batch.behavior.shape, -1.0, requires_grad=True)
    policy_loss(logprobs, batch, config=LossConfig(), step=2, scale=1.0).backward()
    weight = (logprobs.detach() - batch.behavior).exp().clamp(max=2.0)
    expected = -weight * batch.advantages[:, None] * batch.mask
    torch.testing.assert_close(logprobs.grad, expected)


def test_advantages_have_no_mean_within_a_group_and_none_where_all_earned_the_same() -> None:
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5]), 4)
    assert advantages[:4].tolist() == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)
    assert advantages[4:].tolist() == [0, 0, 0, 0]


def test_a_batch_survives_packing_bit_for_bit() -> None:
    batch = make_batch(spare=2)
    packed = batch.pack()
    assert packed.shape == packed_shape(10, CONFIG.model.context)
    again = TrainingBatch.unpack(packed)
    for name in ("tokens", "behavior", "mask", "versions", "rewards"):
        assert torch.equal(getattr(batch, name), getattr(again, name)), name
    assert again.sampled_by == [0, 1, 2]
    assert again.used.tolist() == [True] * 8 + [False] * 2


def test_rows_of_dropped_prompts_and_trimmed_columns_change_nothing() -> None:
    model = build_model(CONFIG.model, seed=1)

    def loss(batch: TrainingBatch) -> float:
        logprobs = target_logprobs(model(batch.tokens), batch.tokens)
        scale = 1 / batch.token_count
        return policy_loss(logprobs, batch, config=LossConfig(), step=2, scale=scale).item()

    assert loss(make_batch(spare=4).trimmed()) == pytest.approx(loss(make_batch()), rel=1e-5)
    assert make_batch().trimmed().tokens.shape[1] < CONFIG.model.context


def test_the_model_decodes_what_it_would_predict_in_one_pass() -> None:
    model = build_model(CONFIG.model, seed=2)
    tokens = torch.randint(0, 128, (3, CONFIG.model.context))
    cache, logits = model.new_cache(3), []
    for at in range(CONFIG.model.context):
        logits.append(model.decode(tokens[:, at], torch.full((3,), at), cache))
    torch.testing.assert_close(torch.stack(logits, 1), model(tokens), atol=1e-4, rtol=1e-4)
