"""Settings of jobs of several policies, for tests with real processes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.adapters.rl.config import RLConfig, WarmStart, preset
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.ledger.checker import CheckConfig
from holdfast.adapters.rl.loss.ppo import LossConfig
from holdfast.adapters.rl.policy.settings import PolicyConfig
from holdfast.adapters.rl.weights import warm_up


def job_of_policies(warm: Path, *, steps: int) -> RLConfig:
    """Return a job in which a critic helps a solver, and a copy of the solver stays as it was."""
    tiny = preset("tiny")
    config = msgspec.structs.replace(
        tiny,
        environment=EnvironmentConfig(factory="reviewed"),
        model=msgspec.structs.replace(tiny.model, context=40),
        policies={
            "solver": PolicyConfig(),
            "critic": PolicyConfig(lr=1e-4, loss=LossConfig(proximal="ewma", baseline="median")),
            "old": PolicyConfig(frozen=True),
        },
        warm=WarmStart(steps=20, rows=16, lr=3e-3),
        warm_start=str(warm),
        steps=steps,
        lr=3e-4,
        held_out=2,
        evaluate_every=steps,
        check=CheckConfig(recompute_every=2, fatal=True),
        log_every_ticks=1,
    )
    assert warm_up.prepare(config)
    return config
