"""A run in one process has the configured lag, learns, and is deterministic."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from learning.lagged import LaggedRun

from holdfast.adapters.rl.config import preset
from holdfast.adapters.rl.environments.task import make_task
from holdfast.adapters.rl.loss.ppo import LossConfig
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.adapters.rl.weights.warm_up import warm_up

torch.set_num_threads(1)
CONFIG = msgspec.structs.replace(preset("tiny"), steps=5, evaluate_every=2)
WARMED = warm_up(CONFIG, make_task(CONFIG.task, seed=CONFIG.task_seed))


def curve(loss: LossConfig) -> list[tuple[int, float]]:
    config = msgspec.structs.replace(CONFIG, loss=loss)
    return LaggedRun(config, WARMED).held_out_curve()


@pytest.mark.parametrize("proximal", ["current", "ewma", "recomputed"])
def test_equal_settings_give_equal_curves(proximal: str) -> None:
    loss = msgspec.convert({"proximal": proximal, "baseline": "minimum_variance"}, LossConfig)
    found = curve(loss)
    assert found == curve(loss)
    assert [step for step, _ in found] == [0, 2, 4, 5]
    assert len({value for _, value in found}) > 1


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "gspo", "proximal": "behavior", "clip_low": 3e-4, "clip_high": 4e-4},
        {"objective": "cispo", "proximal": "behavior", "kl": {"renew_every": 2}},
        {"correction": "icepop", "proximal": "recomputed", "kl": {"as_reward": True}},
    ],
)
def test_every_loss_gives_equal_curves_and_a_penalty_shows(settings: dict[str, Any]) -> None:
    loss = msgspec.convert(settings, LossConfig)
    found = curve(loss)
    assert found == curve(loss)
    assert found != curve(msgspec.structs.replace(loss, objective="ppo", kl=None))


def test_weights_of_low_precision_sample_a_curve_of_their_own() -> None:
    config = msgspec.structs.replace(CONFIG, rollout_precision="int4")
    curves = [LaggedRun(config, WARMED).held_out_curve() for _ in range(2)]
    assert curves[0] == curves[1] != curve(LossConfig())


def test_samples_are_of_the_version_that_the_lag_allows() -> None:
    run = LaggedRun(CONFIG, WARMED)
    lags: list[int] = []
    sample = run._sample

    def watched(step: int) -> list[Trajectory]:
        samples = sample(step)
        lags.extend({step - version for each in samples for version in each.token_versions})
        return samples

    run._sample = watched  # type: ignore[method-assign]
    run.held_out_curve()
    assert lags == [0, 1, 2, 2, 2]
