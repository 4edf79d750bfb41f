"""Reinforcement learning in a training loop of your own: claims, token logs, published weights."""

from holdfast.adapters.rl.engines.completions import CompletionServer
from holdfast.adapters.rl.engines.pool import EnginePool
from holdfast.adapters.rl.engines.protocol import SampledToken, SamplingEngine, TokenPlace
from holdfast.adapters.rl.environments.base import Action, Observation
from holdfast.adapters.rl.library import (
    BatchPlan,
    Borrowed,
    Mode,
    Rollouts,
    Sample,
    Share,
    Trajectory,
    TurnLimits,
)
from holdfast.adapters.rl.sampler_process import attach

__all__ = [
    "Action",
    "BatchPlan",
    "Borrowed",
    "CompletionServer",
    "EnginePool",
    "Mode",
    "Observation",
    "Rollouts",
    "Sample",
    "SampledToken",
    "SamplingEngine",
    "Share",
    "TokenPlace",
    "Trajectory",
    "TurnLimits",
    "attach",
]
