"""The override by which a command line of torchtitan chooses Holdfast's checkpoints.

    --override.imports holdfast.adapters.torchtitan.override.checkpoints

torchtitan imports this module, and finds the function among its registered overrides.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from holdfast.adapters.torchtitan.making import holdfast_checkpoints

__all__ = ["checkpoints"]


def checkpoints(config: Any) -> Any:
    """Return the configuration of a manager that stores with Holdfast, with the same settings.

    Raises ``ConfigError`` as `holdfast_checkpoints` does.
    """
    return holdfast_checkpoints(config)


if find_spec("torchtitan") is not None:  # the reference is made without it
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.config.override import override

    override(target=BaseCheckpointManager.Config, description="Holdfast's format")(checkpoints)
