"""Modes of the tracked modules: which parameters are frozen, and which modules evaluate.

A loop that unfreezes a backbone, or stops the statistics of its norms, does so once, at some step.
A restore builds the modules anew and goes on after that step. So the modes in which a step left the
modules are part of the state, as differences from those in which the loop began.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from torch import nn

from holdfast.ckpt.state.model_parts import ModelParts
from holdfast.elastic.gradients.wrapped import Parts
from holdfast.elastic.tracked.cursor import Cursor


class ModesOfModules:
    """The modes of the modules of one generation, kept in the cursor.

    Of a script whose modules begin in other modes than the saved run's, the script's count.
    """

    def __init__(self, modules: Mapping[str, nn.Module | ModelParts], cursor: Cursor) -> None:
        self._parts, self._cursor = Parts(modules), cursor
        self._begun: dict[str, bool] = {}

    def begin(self) -> None:
        """Bring back the saved modes, before the first step of the generation."""
        if self._begun:
            return
        self._begun = self._read()
        saved = self._cursor.modes
        if saved and saved[0] == self._signature():
            flips = dict(zip(self._begun, f"{int(saved[1], 16):0{len(self._begun)}b}", strict=True))
            self._set({name: was != (flips[name] == "1") for name, was in self._begun.items()})
        self.note()

    def note(self) -> None:
        """Write the present modes to the cursor."""
        now = self._read()
        flips = "".join(str(int(now.get(name, was) != was)) for name, was in self._begun.items())
        is_any = "1" in flips
        self._cursor.modes = (self._signature(), f"{int(flips, 2):x}") if is_any else None

    def _signature(self) -> int:
        return zlib.crc32(repr(self._begun).encode())

    def _read(self) -> dict[str, bool]:
        """Return by name whether a module trains, and whether a parameter of its own does."""
        self._parts.renew()
        found = {}
        for name, part in self._parts.named:
            found[f"{name}."] = part.training
            for key, parameter in part.named_parameters(recurse=False):
                found[f"{name}.{key}"] = parameter.requires_grad
        return found

    def _set(self, modes: Mapping[str, bool]) -> None:
        for name, part in self._parts.named:
            part.training = modes.get(f"{name}.", part.training)
            for key, parameter in part.named_parameters(recurse=False):
                parameter.requires_grad_(modes.get(f"{name}.{key}", parameter.requires_grad))
