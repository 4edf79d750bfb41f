"""`holdfast_strategy`: a strategy of Fabric or of the Trainer with Holdfast's checkpoints."""

from __future__ import annotations

import functools
from typing import Any, Final

from holdfast.adapters.lightning.saving import HoldfastSaving
from holdfast.adapters.lightning.trainer_saving import TrainerSaving
from holdfast.ckpt import ArgumentError

SUPPORTED: Final = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
"""Strategies of Fabric and of the Trainer, by the names of their classes."""

_PACKAGES: Final = {
    "lightning.fabric.strategies": HoldfastSaving,
    "lightning_fabric.strategies": HoldfastSaving,
    "lightning.pytorch.strategies": TrainerSaving,
    "pytorch_lightning.strategies": TrainerSaving,
}

_REMEDIES: Final = {
    "FSDPStrategy": "use ModelParallelStrategy, and fully_shard in its parallelize_fn or in "
    "configure_model",
    "DeepSpeedStrategy": "use ModelParallelStrategy, or keep its checkpoints, which `holdfast "
    "convert` reads (docs/how-to/deepspeed.md)",
}


def holdfast_strategy(kind: type) -> Any:
    """Return ``kind``, a strategy of Fabric or of the Trainer, with Holdfast's checkpoints.

    ``kind`` is a class of `lightning.fabric.strategies` or `lightning.pytorch.strategies`. An
    object of the class that is returned goes to ``Fabric(strategy=...)`` or
    ``Trainer(strategy=...)``. Then their saves and loads write and read Holdfast's format,
    collectively, and for any number of ranks.

    Raises ``ArgumentError`` for a class that is no strategy, or one that is not supported.
    """
    known = [(each.__name__, found) for each in _ancestors(kind) if (found := _saving(each))]
    if not known:
        raise ArgumentError(
            f"holdfast_strategy({_name(kind)}): give a class of lightning.fabric.strategies or "
            "lightning.pytorch.strategies, such as DDPStrategy (pip install 'holdfast[lightning]')"
        )
    name, saving = known[0]
    if name not in SUPPORTED:
        remedy = _REMEDIES.get(name, f"use one of {', '.join(SUPPORTED)}")
        raise ArgumentError(f"holdfast_strategy({_name(kind)}): {name} is not supported; {remedy}")
    return _made(kind, saving)


def _ancestors(kind: object) -> tuple[type, ...]:
    return kind.__mro__ if isinstance(kind, type) else ()


def _saving(kind: type) -> type | None:
    return next((e for name, e in _PACKAGES.items() if kind.__module__.startswith(name)), None)


def _name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else repr(kind)


@functools.cache
def _made(kind: type, saving: type) -> Any:
    """Return the subclass of ``kind`` that saves by ``saving``, the same one each time."""
    return type(f"Holdfast{kind.__name__}", (saving, kind), {"__module__": __name__})
