"""Holdfast's checkpoints: save, load and open the state of a training job.

The names below are imported when they are first used, so that ``import ckpt`` (which the sidecar
and the agent do) does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.api import load, open, save
    from ckpt.errors import (
        CapacityError,
        CkptError,
        CorruptError,
        FencedError,
        MismatchError,
        NotFoundError,
        PeerError,
        StateError,
        StoreError,
    )
    from ckpt.flatten import PerRank, Stateful
    from ckpt.held import FlatPart, Part
    from ckpt.model_parts import ModelParts
    from ckpt.restore import RestoreReport
    from ckpt.view import Checkpoint, TensorView

__all__ = [
    "CapacityError",
    "Checkpoint",
    "CkptError",
    "CorruptError",
    "FencedError",
    "FlatPart",
    "MismatchError",
    "ModelParts",
    "NotFoundError",
    "Part",
    "PeerError",
    "PerRank",
    "RestoreReport",
    "StateError",
    "Stateful",
    "StoreError",
    "TensorView",
    "load",
    "open",
    "save",
]

_MODULE_OF = {
    **dict.fromkeys(("load", "open", "save"), "ckpt.api"),
    **dict.fromkeys(("Checkpoint", "TensorView"), "ckpt.view"),
    **dict.fromkeys(("PerRank", "Stateful"), "ckpt.flatten"),
    **dict.fromkeys(("FlatPart", "Part"), "ckpt.held"),
    "ModelParts": "ckpt.model_parts",
    "RestoreReport": "ckpt.restore",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF.get(name, "ckpt.errors")), name)


def __dir__() -> list[str]:
    return __all__
