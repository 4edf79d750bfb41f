"""Reinforcement learning in a training loop of your own: claims, token logs, published weights."""

from holdfast.adapters.rl.environments.base import Action, Observation
from holdfast.adapters.rl.library import BatchPlan, Mode, Rollouts, Sample, Trajectory, TurnLimits
from holdfast.adapters.rl.sampler_process import attach

__all__ = [
    "Action",
    "BatchPlan",
    "Mode",
    "Observation",
    "Rollouts",
    "Sample",
    "Trajectory",
    "TurnLimits",
    "attach",
]
