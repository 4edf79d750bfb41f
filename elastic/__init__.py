"""Holdfast's training loop: `resilient` keeps a training function alive.

Names are loaded when first used, so that processes without torch may import this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.alltoall import all_to_all
    from elastic.config import Batch, Mesh
    from elastic.data.loaders import Loader
    from elastic.data.order import Weighted
    from elastic.errors import (
        ConfigError,
        CoordinatorError,
        ElasticError,
        Fenced,
        JobFailed,
        LeaseExpired,
        Stopped,
    )
    from elastic.loop import resilient
    from elastic.loss import LossGuard
    from elastic.run import Run

__all__ = [
    "Batch",
    "ConfigError",
    "CoordinatorError",
    "ElasticError",
    "Fenced",
    "JobFailed",
    "LeaseExpired",
    "Loader",
    "LossGuard",
    "Mesh",
    "Run",
    "Stopped",
    "Weighted",
    "all_to_all",
    "resilient",
]

_HOMES = {
    "Batch": "config",
    "Loader": "data.loaders",
    "LossGuard": "loss",
    "Mesh": "config",
    "Run": "run",
    "Weighted": "data.order",
    "all_to_all": "alltoall",
    "resilient": "loop",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"elastic.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
