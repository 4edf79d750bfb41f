"""A run in one process has the configured lag, learns, and is deterministic."""

from __future__ import annotations

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
