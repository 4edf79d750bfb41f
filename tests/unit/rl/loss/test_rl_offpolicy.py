"""Advantages, importance ratios, and the pass over a batch, against naive versions."""

from __future__ import annotations

import math
from itertools import pairwise

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from loss_batches import CONFIG, make_batch

from holdfast.adapters.rl.loss.advantages import Baseline, group_advantages
from holdfast.adapters.rl.loss.ppo import LossConfig, policy_loss, target_logprobs
from holdfast.adapters.rl.loss.ratios import (
    behavior_weights,
    effective_share,
    score_norms,
    sequence_ratios,
    staleness_weights,
)
from holdfast.adapters.rl.policy.model import build_model
from holdfast.adapters.rl.training.proximal import Ewma, Recomputed
from holdfast.adapters.rl.training.survey import survey

torch.set_num_threads(1)
LOGS = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=8)


def test_the_median_is_not_moved_by_an_outlier() -> None:
    rewards = torch.tensor([0.1, 0.2, 0.3, 0.4, 9.0])
    advantages = group_advantages(rewards, 5, baseline="median", normalize=False)
    assert advantages.tolist() == pytest.approx([-0.2, -0.1, 0.0, 0.1, 8.7])
    by_mean = group_advantages(rewards, 5, normalize=False)
    assert (by_mean[:4] < 0).all(), "the mean turns the sign of the fourth"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rewards=st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4), scale=st.floats(0.1, 9))
def test_equal_variances_make_the_minimum_variance_baseline_the_mean(
    rewards: list[float], scale: float
) -> None:
    table = torch.tensor(rewards)
    variances = torch.full((4,), scale)
    found = group_advantages(table, 4, baseline="minimum_variance", variances=variances)
    torch.testing.assert_close(found, group_advantages(table, 4), atol=1e-3, rtol=1e-3)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rewards=st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4),
    variances=st.lists(st.floats(2**-6, 5, width=32), min_size=4, max_size=4),
    other=st.floats(-1, 2),
)
def test_no_other_baseline_has_less_variance(
    rewards: list[float], variances: list[float], other: float
) -> None:
    table, weights = torch.tensor(rewards).double(), torch.tensor(variances).double()
    best = group_advantages(
        table, 4, baseline="minimum_variance", normalize=False, variances=weights
    )
    assert (weights * best**2).sum() <= (weights * (table - other) ** 2).sum() + 1e-9


def test_a_minimum_variance_baseline_needs_variances_but_lives_with_zeros() -> None:
    rewards = torch.tensor([0.0, 1.0])
    with pytest.raises(ValueError, match="needs the variances"):
        group_advantages(rewards, 2, baseline="minimum_variance")
    found = group_advantages(
        rewards, 2, baseline="minimum_variance", normalize=False, variances=torch.zeros(2)
    )
    assert found.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("baseline", ["mean", "median"])
def test_a_group_in_which_all_earned_the_same_teaches_nothing(baseline: Baseline) -> None:
    assert group_advantages(torch.full((4,), 0.7), 4, baseline=baseline).abs().max() < 1e-3


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(logs=LOGS)
def test_weights_are_the_naive_ones(logs: list[float]) -> None:
    proximal, behavior = torch.tensor([logs]), torch.zeros(1, len(logs))
    mask = torch.ones_like(behavior)

    def weights(correction: str) -> list[float]:
        found = behavior_weights(proximal, behavior, mask, correction=correction, cap=2.0)  # type: ignore[arg-type]
        return found[0].tolist()

    ratios = [math.exp(log) for log in logs]
    assert weights("token") == pytest.approx([min(2, r) for r in ratios], rel=1e-4)
    prefix = [min(2, r * min([1.0, *ratios[:at]])) for at, r in enumerate(ratios)]
    assert weights("prefix") == pytest.approx(prefix, rel=1e-4)
    whole = min(2, math.exp(sum(logs)))
    assert weights("sequence") == pytest.approx([whole] * len(logs), rel=1e-3)


def test_what_was_not_sampled_weighs_nothing_in_a_prefix_or_a_sequence() -> None:
    proximal = torch.tensor([[-9.0, 0.1, 0.2, -9.0]])
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    for correction in ("prefix", "sequence"):
        found = behavior_weights(proximal, torch.zeros(1, 4), mask, correction=correction, cap=2.0)
        assert (found[0, 1:3] > 1).all(), correction


def test_older_tokens_weigh_less() -> None:
    found = staleness_weights(torch.tensor([[5, 4, 3]]), step=5, discount=0.5)
    assert found.tolist() == [[1.0, 0.5, 0.25]]
    batch, logprobs = make_batch(), -torch.ones(8, CONFIG.model.context - 1)
    plain = policy_loss(logprobs, batch, config=LossConfig(), step=2, scale=1.0)
    config = LossConfig(staleness_discount=0.5)
    none_stale = msgspec.structs.replace(config, staleness_discount=1.0)
    assert policy_loss(logprobs, batch, config=none_stale, step=2, scale=1.0) == plain
    rows = batch.versions.amax(1)
    weights = 0.5 ** (2 - rows.float())
    by_hand = sum(
        float(weight)
        * float(
            policy_loss(
                logprobs[row : row + 1],
                batch.part(row, of=8),
                config=LossConfig(),
                step=2,
                scale=1.0,
            )
        )
        for row, weight in enumerate(weights)
    )
    found_loss = policy_loss(logprobs, batch, config=config, step=2, scale=1.0)
    assert float(found_loss) == pytest.approx(by_hand, rel=1e-4)


def test_the_effective_share_falls_when_few_samples_dominate() -> None:
    shares = [effective_share(torch.tensor([1.0, 1.0, 1.0, top])) for top in (1.0, 3.0, 30.0)]
    assert shares[0] == 1.0
    assert all(later < earlier for earlier, later in pairwise(shares))
    assert shares[-1] == pytest.approx(0.25, abs=0.06)
    assert effective_share(torch.zeros(3)) == effective_share(torch.zeros(0)) == 1.0


def test_score_norms_are_the_squared_norms_of_the_gradients() -> None:
    batch = make_batch(rows=4)
    logits = torch.randn(4, CONFIG.model.context, 128, requires_grad=True)
    found = score_norms(logits.detach(), batch.tokens, batch.mask)
    for row in range(4):
        total = 0.0
        for at in batch.mask[row].nonzero():
            (gradient,) = torch.autograd.grad(
                target_logprobs(logits, batch.tokens)[row, at.item()], logits
            )
            total += float(gradient.square().sum())
        assert float(found[row]) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_survey_is_the_same_however_many_ranks_share_it(ranks: int) -> None:
    model, batch = build_model(CONFIG.model, seed=1), make_batch(spare=4)
    found = []
    for rank in range(ranks):
        shares: list[torch.Tensor] = []
        survey(
            model,
            batch,
            microbatches=4,
            rank=rank,
            ranks=ranks,
            sum_=shares.append,
            proximal=Ewma(build_model(CONFIG.model, seed=2), model, decay=0.5),
        )
        found += shares
    alone = survey(
        model,
        batch,
        microbatches=4,
        rank=0,
        ranks=1,
        sum_=lambda _: None,
        proximal=Ewma(build_model(CONFIG.model, seed=2), model, decay=0.5),
    )
    total = torch.stack(found).sum(0)
    assert torch.equal(total[:, 0], alone.ratios)
    assert torch.equal(total[:, 1], alone.norms)
    assert alone.proximal is not None
    assert torch.equal(total[:, 2:].float(), alone.proximal)
    logprobs = target_logprobs(model(batch.tokens), batch.tokens)
    expected = sequence_ratios(logprobs, batch.behavior, batch.mask)
    torch.testing.assert_close(alone.ratios, expected.detach(), rtol=1e-4, atol=1e-6)


def test_recomputed_log_probabilities_are_of_each_tokens_own_version() -> None:
    models = {version: build_model(CONFIG.model, seed=version) for version in range(3)}
    requests: list[int] = []

    def weights_of(version: int) -> dict[str, torch.Tensor]:
        requests.append(version)
        return models[version].state_dict()

    batch = make_batch(spare=2)
    parts = [batch.part(index, of=5) for index in range(5)]
    found = torch.cat(Recomputed(build_model(CONFIG.model, seed=9), weights_of).logprobs(parts))
    assert requests == [0, 1, 2]
    for row, tokens in enumerate(batch.tokens):
        logprobs = target_logprobs(models[row % 3](tokens[None]), tokens[None])[0]
        torch.testing.assert_close(found[row], logprobs.detach() * batch.mask[row])


def test_a_mean_policy_follows_the_policy_and_keeps_its_own_weights() -> None:
    policy, module = build_model(CONFIG.model, seed=1), build_model(CONFIG.model, seed=1)
    mean = Ewma(module, policy, decay=0.75)
    before = module.head.weight.clone()
    with torch.no_grad():
        policy.head.weight.add_(1.0)
    assert torch.equal(module.head.weight, before)
    mean.update()
    torch.testing.assert_close(module.head.weight.detach(), before + 0.25)
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(
    ("field", "value"),
    [("ewma_decay", 1.0), ("staleness_discount", 0.0), ("baseline", "mode"), ("correction", "x")],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({field: value}, LossConfig)
