"""Reinforcement learning for a training loop of your own: claims, token logs, published weights."""

from holdfast.adapters.rl.library import BatchPlan, Limits, Mode, Rollouts, Sample, Trajectory
from holdfast.adapters.rl.sampler_process import attach

__all__ = ["BatchPlan", "Limits", "Mode", "Rollouts", "Sample", "Trajectory", "attach"]
