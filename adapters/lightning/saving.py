"""Saving and loading for strategies of Fabric; `holdfast_strategy` mixes it in.

No part of Lightning is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from holdfast import ckpt
from holdfast.adapters.lightning.places import place_to_load, place_to_save
from holdfast.adapters.shared.buffers import settle_buffers
from holdfast.ckpt import ArgumentError
from holdfast.ckpt.collective import RankWorld


class OwnFormat:
    """The part of a strategy that refuses plugins for another format."""

    @property
    def checkpoint_io(self) -> Any:
        """The plugin of the strategy, which this format does not use."""
        return super().checkpoint_io  # type: ignore[misc]

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        raise ArgumentError(
            f"plugins={type(io).__name__}: such a plugin writes a format of its own; leave it out, "
            "or give the strategy without holdfast_strategy"
        )


class HoldfastSaving(OwnFormat):
    """The parts of a Fabric strategy that save and load, with Holdfast's checkpoints."""

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: Any = None,
    ) -> None:
        """Save a state; every rank writes its own part. Raises as `holdfast.save` does."""
        with RankWorld().agreed():
            for name, value in (("storage_options", storage_options), ("filter", filter)):
                if value is not None:
                    raise ArgumentError(
                        f"fabric.save({name}=...): not supported; save a dict that has only the "
                        "wanted tensors, and name a store by its address (s3://bucket/prefix)"
                    )
            root, step = place_to_save(os.fspath(path), state)
        settle_buffers(dict(_modules(state)))
        ckpt.save(root, state, step=step)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load into a state in place; return the plain values that the state has no entry for.

        Nothing is ever unpickled, whatever ``weights_only`` says. Raises as `holdfast.load` does.
        """
        with RankWorld().agreed():
            if not isinstance(state, dict) or not state:
                raise ArgumentError(
                    "fabric.load(path), fabric.load_raw: give the state to fill, as in "
                    "fabric.load(path, {'model': model}); holdfast.open(path) reads a checkpoint "
                    "without one"
                )
        root, step = place_to_load(os.fspath(path))
        own = {pattern: "exact" for name in state for pattern in (name, f"{name}.*")}
        levels: Any = {**own, "*": "ignore-extra"} if strict else "ignore"
        report = ckpt.load(root, state, step=step, strict=levels)
        with ckpt.open(root, step=report.step) as opened:
            return {
                name: opened.values[name]
                for name in report.extra
                if name in opened.values and name.partition(".")[0] not in state
            }


def _modules(state: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a state, those in dicts too, with their names."""
    for key, value in state.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _modules(value, name)
