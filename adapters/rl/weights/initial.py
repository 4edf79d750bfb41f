"""A job's policy as its settings describe it, before any training."""

from __future__ import annotations

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.policy.model import build_model
from holdfast.adapters.rl.policy.policy import Policy


def build_policy(config: RLConfig) -> Policy:
    """Return the job's policy before any training: a pure function of the configuration."""
    if config.pretrained is not None:
        from holdfast.adapters.rl.policy.pretrained import load_pretrained

        return load_pretrained(config.pretrained, context=config.model.context)
    return build_model(config.model, seed=config.seed)
