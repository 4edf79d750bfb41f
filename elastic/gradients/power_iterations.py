"""Spectral norms: every forward of a pass starts from the same vectors, the pass leaves one update.

Such a layer estimates its weight's norm by one step of the power method per forward. The step
depends on the weight and the last vectors alone, not on samples. So if every forward of a pass
starts from the vectors that the pass began with, all of them make the same update, on any rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from holdfast.ckpt.torch_private import SpectralNorm


@dataclass(slots=True, eq=False)
class _NormalizedLayer:
    """A module with the names of its vectors; their values in the pass."""

    module: nn.Module
    keys: tuple[str, ...]
    saved: dict[str, torch.Tensor] | None = None
    updated: dict[str, torch.Tensor] | None = None


class PowerIterations:
    """The vectors of both of torch's spectral norms over one pass at a time."""

    def __init__(self) -> None:
        self._layers: dict[int, _NormalizedLayer] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.active = False

    def learn(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """Hook the layers among the modules ``parts``, each with its name."""
        for _, part in parts:
            keys = () if id(part) in self._layers else _vectors(part)
            if keys:
                layer = self._layers[id(part)] = _NormalizedLayer(part, keys)
                before, after = (functools.partial(f, layer) for f in (self._before, self._after))
                # The older spectral norm makes its step in a forward pre-hook itself.
                self._handles.append(part.register_forward_pre_hook(before, prepend=True))
                self._handles.append(part.register_forward_hook(after, always_call=True))

    def begin_pass(self) -> None:
        """Start a pass."""
        self.active = False
        for layer in self._layers.values():
            layer.saved = layer.updated = None

    def _before(self, layer: _NormalizedLayer, module: nn.Module, _args: object) -> None:
        if self.active and module.training:
            layer.saved = {key: getattr(module, key) for key in layer.keys}
            for key, vector in layer.saved.items():
                setattr(module, key, vector.clone())

    def _after(
        self, layer: _NormalizedLayer, module: nn.Module, _args: object, _output: object
    ) -> None:
        saved, layer.saved = layer.saved, None
        if saved is None:
            return
        if layer.updated is None:
            layer.updated = {key: getattr(module, key) for key in saved}
        for key, vector in saved.items():
            setattr(module, key, vector)

    @torch.no_grad()
    def end_pass(self) -> None:
        """Store the update, where this rank ran the layer."""
        self.active = False
        for layer in self._layers.values():
            for key, vector in (layer.updated or {}).items():
                getattr(layer.module, key).copy_(vector)
            layer.updated = None

    def keeps(self, part: nn.Module, key: str) -> bool:
        """Return whether a buffer is such a vector."""
        layer = self._layers.get(id(part))
        return layer is not None and key in layer.keys

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._layers.clear()


def _vectors(part: nn.Module) -> tuple[str, ...]:
    """Return the names of the vectors that a module keeps for spectral norms."""
    buffers = dict(part.named_buffers(recurse=False))
    if isinstance(part, SpectralNorm):
        return tuple(buffers)
    weights = [
        name.removesuffix("_orig")
        for name, _ in part.named_parameters(recurse=False)
        if name.endswith("_orig")
    ]
    pairs = [(f"{weight}_u", f"{weight}_v") for weight in weights]
    return tuple(key for pair in pairs if all(k in buffers for k in pair) for key in pair)
