"""The engines of a job's policies, each with slots and a cache of its own, and its judges."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.policy.judge import PolicyJudge
from holdfast.adapters.rl.policy.policy import Policy
from holdfast.adapters.rl.policy.rounding import Precision
from holdfast.adapters.rl.policy.team import prefix_of
from holdfast.adapters.rl.rollout.engine import Engine


def engines_of(
    config: RLConfig,
    policies: Mapping[str, Policy],
    *,
    pinned: bool = True,
    precision: Precision = "full",
) -> list[Engine]:
    """Return an engine for each policy that may speak, in their order.

    Without an environment that is the first one. Frozen ones keep their precision.
    """
    speaking = list(policies) if config.environment is not None else [*policies][:1]
    engines = [
        Engine(
            policy=policies[name],
            limits=config.limits,
            slots=config.slots,
            seed=config.seed,
            pinned=pinned,
            precision=precision if name not in config.frozen else "full",
            prefix=prefix_of(name),
        )
        for name in speaking
    ]
    for engine in engines[1:]:
        engine.log_with(engines[0])
    return engines


def judges_of(config: RLConfig, policies: Mapping[str, Policy]) -> dict[str, PolicyJudge]:
    """Return a judge for each frozen policy of a job, by name."""
    tokenizer = config.tokenizer
    return {
        name: PolicyJudge(name, policy, tokenizer=tokenizer, context=config.model.context)
        for name, policy in policies.items()
        if name in config.frozen
    }
