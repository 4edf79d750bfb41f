"""`holdfast_checkpoints`, which imports torchtitan when it is called."""

from __future__ import annotations

from typing import Any

from holdfast.elastic import ConfigError


def holdfast_checkpoints(config: Any) -> Any:
    """Return ``config``, a ``CheckpointManager.Config``, for a manager that stores with Holdfast.

    All settings stay. The result is the ``Config`` of a subclass of torchtitan's
    ``CheckpointManager``. Raises ``ConfigError`` for the configuration of another manager, and if
    torchtitan is missing or of a version that is not supported.
    """
    try:
        from torchtitan.components.checkpointer.dcp import CheckpointManager
        from torchtitan.config.override import derive

        from holdfast.adapters.torchtitan.manager import HoldfastCheckpointManager
    except ImportError as error:
        raise ConfigError(
            f"holdfast_checkpoints needs torchtitan 0.3 ({error}): "
            "pip install 'holdfast[torchtitan]'"
        ) from error
    if isinstance(config, HoldfastCheckpointManager.Config):
        return config
    if type(config) is not CheckpointManager.Config:
        raise ConfigError(
            f"holdfast_checkpoints: {type(config).__qualname__} configures another checkpoint "
            "manager, whose work Holdfast would leave out: give a CheckpointManager.Config of "
            "torchtitan.components.checkpointer"
        )
    return derive(config, HoldfastCheckpointManager.Config)
