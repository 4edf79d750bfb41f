"""`holdfast_strategy`: a strategy of Fabric with Holdfast's checkpoints."""

from __future__ import annotations

import functools
from typing import Any, Final

from holdfast.adapters.lightning.saving import HoldfastSaving
from holdfast.ckpt import ArgumentError

SUPPORTED: Final = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
"""Strategies of Fabric, by the names of their classes."""

_FABRIC: Final = ("lightning.fabric.strategies", "lightning_fabric.strategies")
_TRAINER: Final = ("lightning.pytorch.", "pytorch_lightning.")

_REMEDIES: Final = {
    "FSDPStrategy": "use ModelParallelStrategy, whose parallelize_fn calls fully_shard",
    "DeepSpeedStrategy": "use ModelParallelStrategy, or keep its checkpoints, which `holdfast "
    "convert` reads (docs/how-to/deepspeed.md)",
}


def holdfast_strategy(kind: type) -> Any:
    """Return ``kind``, a class of `lightning.fabric.strategies`, with Holdfast's checkpoints.

    An object of the class goes to ``Fabric(strategy=...)``. Then ``fabric.save`` and
    ``fabric.load`` write and read Holdfast's format, collectively, and for any number of ranks.

    Raises ``ArgumentError`` for a class that is no strategy of Fabric, or a strategy that is not
    supported.
    """
    origins = [f"{each.__module__}.{each.__qualname__}" for each in _ancestors(kind)]
    if any(name.startswith(_TRAINER) for name in origins):
        raise ArgumentError(
            f"holdfast_strategy({kind.__name__}): a strategy of the Trainer is not supported yet; "
            "give one of lightning.fabric.strategies, or write the loop with Fabric"
        )
    known = [each.__name__ for each in _ancestors(kind) if each.__module__.startswith(_FABRIC)]
    if not known:
        raise ArgumentError(
            f"holdfast_strategy({_name(kind)}): give a class of lightning.fabric.strategies, such "
            "as DDPStrategy (pip install 'holdfast[lightning]')"
        )
    if known[0] not in SUPPORTED:
        remedy = _REMEDIES.get(known[0], f"use one of {', '.join(SUPPORTED)}")
        raise ArgumentError(
            f"holdfast_strategy({_name(kind)}): {known[0]} is not supported; {remedy}"
        )
    return _made(kind)


def _ancestors(kind: object) -> tuple[type, ...]:
    return kind.__mro__ if isinstance(kind, type) else ()


def _name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else repr(kind)


@functools.cache
def _made(kind: type) -> Any:
    """Return the subclass of ``kind`` and `HoldfastSaving`, the same one each time."""
    return type(f"Holdfast{kind.__name__}", (HoldfastSaving, kind), {"__module__": __name__})
