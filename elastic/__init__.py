"""Holdfast's training loop: `resilient` keeps a training function alive.

Names are loaded when first used, so that processes without torch may import this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.config import Batch, Mesh
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
    from elastic.run import Run

__all__ = [
    "Batch",
    "ConfigError",
    "CoordinatorError",
    "ElasticError",
    "Fenced",
    "JobFailed",
    "LeaseExpired",
    "Mesh",
    "Run",
    "Stopped",
    "resilient",
]

_HOMES = {"Batch": "config", "Mesh": "config", "Run": "run", "resilient": "loop"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"elastic.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
