"""The reference policy: a version of the run, the pass over a batch, and its use as a reward."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from loss_batches import CONFIG, make_batch

from holdfast import ckpt
from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.loss.advantages import group_advantages
from holdfast.adapters.rl.loss.batch import TrainingBatch
from holdfast.adapters.rl.loss.divergence import KLConfig, answer_divergences
from holdfast.adapters.rl.loss.ppo import LossConfig, target_logprobs
from holdfast.adapters.rl.policy.model import build_model, weights_hash
from holdfast.adapters.rl.policy.policy import full_tensors
from holdfast.adapters.rl.training.reference import ReferencePolicy
from holdfast.adapters.rl.training.survey import Survey, survey
from holdfast.adapters.rl.training.update import Update
from holdfast.adapters.rl.weights.beginning import load_reference
from holdfast.elastic.errors import ConfigError

torch.set_num_threads(1)


def reference(config: KLConfig, *, seed: int = 1) -> ReferencePolicy:
    return ReferencePolicy(build_model(CONFIG.model, seed=seed), config)


def surveyed(batch: TrainingBatch, *, seed: int = 1) -> Survey:
    return survey(
        build_model(CONFIG.model, seed=2),
        batch,
        microbatches=4,
        rank=0,
        ranks=1,
        sum_=lambda _: None,
        reference=reference(KLConfig(), seed=seed),
    )


def test_without_renewal_the_reference_stays_the_first_version() -> None:
    kept, policy = reference(KLConfig()), build_model(CONFIG.model, seed=2)
    before = weights_hash(full_tensors(kept.policy))
    for version in range(1, 5):
        kept.renew(policy, version=version)
        kept.require(version)
    assert weights_hash(full_tensors(kept.policy)) == before
    assert not any(parameter.requires_grad for parameter in kept.parameters())


def test_a_renewed_reference_is_the_newest_due_version() -> None:
    kept, hashes = reference(KLConfig(renew_every=2)), []
    for version in range(1, 6):
        policy = build_model(CONFIG.model, seed=10 + version)
        kept.renew(policy, version=version)
        kept.require(version)
        hashes.append(weights_hash(full_tensors(kept.policy)))
    first = weights_hash(full_tensors(build_model(CONFIG.model, seed=1)))
    second, fourth = (
        weights_hash(full_tensors(build_model(CONFIG.model, seed=10 + v))) for v in (2, 4)
    )
    assert hashes == [first, second, second, fourth, fourth]


@pytest.mark.parametrize(
    "other", [KLConfig(renew_every=3), KLConfig(renew_every=2, checkpoint="elsewhere", step=4)]
)
def test_a_restored_reference_of_other_settings_is_refused(other: KLConfig) -> None:
    kept = reference(KLConfig(renew_every=2))
    kept.renew(build_model(CONFIG.model, seed=2), version=2)
    restored = reference(other)
    restored.load_state_dict(kept.state_dict())
    with pytest.raises(ConfigError, match="resume with the renew_every, checkpoint and step"):
        restored.require(3)


def test_a_survey_has_the_log_probabilities_of_the_reference() -> None:
    batch = make_batch()
    found = surveyed(batch)
    assert found.reference is not None
    assert found.proximal is None
    model = build_model(CONFIG.model, seed=1)
    expected = target_logprobs(model(batch.tokens), batch.tokens).detach()
    torch.testing.assert_close(found.reference, expected)


@pytest.mark.parametrize("as_reward", [False, True])
def test_the_penalty_is_in_the_loss_or_in_the_rewards(as_reward: bool) -> None:
    kl = KLConfig(weight=0.2, as_reward=as_reward)
    config = msgspec.structs.replace(CONFIG, loss=LossConfig(kl=kl))
    batch = make_batch(spare=4)
    found, used = surveyed(batch), batch.used
    update = Update.of(batch, found, config=config, step=2)
    assert found.reference is not None
    diverged = answer_divergences(found.reference, batch.behavior, batch.mask)[used]
    assert update.divergence == pytest.approx(diverged.mean().item())
    rewards = batch.rewards[used]
    if as_reward:
        rewards = rewards - (0.2 * diverged).float()
        assert update.reference is None
    else:
        assert update.reference is found.reference
    expected = group_advantages(rewards, CONFIG.group)
    torch.testing.assert_close(update.batch.advantages[used], expected)
    plain = msgspec.structs.replace(CONFIG, loss=LossConfig())
    model = build_model(CONFIG.model, seed=2)
    difference = update.loss(model, config=config) - Update.of(
        update.batch, None, config=plain, step=2
    ).loss(model, config=plain)
    assert as_reward or difference.item() > 0


def test_a_reference_comes_from_a_checkpoint_that_fits(tmp_path: Path) -> None:
    there, here = build_model(CONFIG.model, seed=5), build_model(CONFIG.model, seed=6)
    with pytest.raises(ConfigError, match=r"loss\.kl\.checkpoint: .*and a step that it has"):
        load_reference(here, str(tmp_path / "none"), step=7)
    ckpt.save(str(tmp_path / "root"), {"model": there}, step=7)
    with pytest.raises(ConfigError, match="and a step that it has"):
        load_reference(here, str(tmp_path / "root"), step=6)
    load_reference(here, str(tmp_path / "root"), step=7)
    assert weights_hash(full_tensors(here)) == weights_hash(full_tensors(there))
    wide = build_model(msgspec.structs.replace(CONFIG.model, width=128), seed=6)
    with pytest.raises(ConfigError, match="give both policies the same model"):
        load_reference(wide, str(tmp_path / "root"), step=7)


def test_adapters_have_version_0_as_their_reference() -> None:
    text = {"lora": {}, "loss": {"kl": {"checkpoint": "/other", "step": 3}}}
    with pytest.raises(msgspec.ValidationError, match="set checkpoint to null"):
        msgspec.convert(text, RLConfig)
    assert msgspec.convert({"lora": {}, "loss": {"kl": {}}}, RLConfig).loss.surveys


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({"length": {"overlong_tokens": 9}, "max_new_tokens": 8}, "at most the 8"),
        (
            {"length": {"overlong_tokens": 2}, "environment": {"factory": "two_turns"}},
            "give length.per_token instead",
        ),
    ],
)
def test_a_penalty_that_no_answer_could_have_is_refused(text: dict[str, object], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(text, RLConfig)
