"""Experiment trackers for `Run.log_to`: TensorBoard, Weights & Biases and MLflow.

A tracker gets the metrics of a step once, when the step is protected: no value is taken back, and
none comes twice. Its package is imported when its first step comes. See docs/how-to/trackers.md.
"""

from holdfast.adapters.trackers.mlflow import MLflow
from holdfast.adapters.trackers.tensorboard import TensorBoard
from holdfast.adapters.trackers.wandb import WandB

__all__ = ["MLflow", "TensorBoard", "WandB"]
