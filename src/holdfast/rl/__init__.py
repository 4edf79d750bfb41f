"""Reinforcement learning in a training loop of your own: claims, token logs, published weights."""

from holdfast.adapters.rl.engines.completions import CompletionServer
from holdfast.adapters.rl.engines.pool import EnginePool
from holdfast.adapters.rl.engines.protocol import SampledToken, SamplingEngine, TokenPlace
from holdfast.adapters.rl.environments.base import Action, Observation
from holdfast.adapters.rl.library import BatchPlan, Mode, Rollouts, Sample, Trajectory, TurnLimits
from holdfast.adapters.rl.sampler_process import attach

__all__ = [
    "Action",
    "BatchPlan",
    "CompletionServer",
    "EnginePool",
    "Mode",
    "Observation",
    "Rollouts",
    "Sample",
    "SampledToken",
    "SamplingEngine",
    "TokenPlace",
    "Trajectory",
    "TurnLimits",
    "attach",
]
