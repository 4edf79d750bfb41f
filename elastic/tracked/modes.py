"""Modes of the tracked modules: which parameters are frozen, and which modules evaluate.

A loop that unfreezes a backbone, or stops the statistics of its norms, does so once, at some step.
A restore builds the modules anew and goes on after that step. So the modes in which a step left the
modules are part of the state, as differences from those in which the loop began. Ranks with
pipeline stages have different modules, so the state has the differences of all ranks, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from torch import nn

from holdfast.ckpt.state.kinds.model_parts import ModelParts
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.wrapped import Parts
from holdfast.elastic.tracked.cursor import Cursor

_Modes = dict[str, bool]


class ModesOfModules:
    """The modes of the modules of one generation, kept in the cursor.

    If the script's modules begin in other modes than the saved run's, the script's count.
    ``gather`` returns every rank's value. ``staged``: ranks have different modules, the stages of a
    pipeline.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module | ModelParts],
        cursor: Cursor,
        *,
        gather: Callable[[Json], list[Json]],
        staged: bool = False,
    ) -> None:
        self._roots = [
            Parts({key: root})
            for key, tracked in modules.items()
            for root in (tracked if isinstance(tracked, ModelParts) else (tracked,))
        ]
        self._cursor, self._gather, self._staged = cursor, gather, staged
        self._begun: list[_Modes] = []
        self._now: list[_Modes] = []
        self._kept: _Modes = {}

    def begin(self) -> None:
        """Bring back the saved modes, before the first step of the generation."""
        if self._begun:
            return
        self._begun = [_read(root) for root in self._roots]
        for root in self._roots:
            _set(root, self._cursor.modes)
        self.look()
        self._kept = self._changes()

    def look(self) -> bool:
        """Read the modes at the end of a step; return whether any has changed since the last."""
        self._now = [_read(root) for root in self._roots]
        return self._changes() != self._kept

    def keep(self) -> None:
        """Write to the cursor what all ranks' modules changed; collective, after a `look`.

        Modes that differ between data-parallel ranks are not kept, as after an evaluation on one of
        them. Raises ``ConfigError`` if modules of one name in two stages have different modes.
        """
        self._kept = self._changes()
        changed = {
            name
            for names in self._gather([*self._kept])
            for name in msgspec.convert(names, list[str])
        }
        changes = [{name: now[name] for name in changed & now.keys()} for now in self._now]
        values: dict[str, set[bool]] = {name: set() for name in changed}
        for roots in self._gather([dict(each) for each in changes]):
            for root in msgspec.convert(roots, list[_Modes]):
                for name, value in root.items():
                    values[name].add(value)
        unclear = sorted(name for name, found in values.items() if len(found) > 1)
        if unclear and self._staged:
            raise ConfigError(
                f"modules or parameters of the name {unclear[0]!r} in several pipeline stages were "
                "left in different modes, so a stage that is built anew cannot get them back: "
                "set them alike in all stages, or give them names of their own"
            )
        self._cursor.modes = {n: found.pop() for n, found in values.items() if len(found) == 1}

    def _changes(self) -> _Modes:
        return {
            name: now[name]
            for begun, now in zip(self._begun, self._now, strict=True)
            for name, was in begun.items()
            if now.get(name, was) != was
        }


def _read(root: Parts) -> _Modes:
    """Return by name whether a module trains, and whether a parameter of its own does."""
    root.renew()
    found = {}
    for name, part in root.named:
        found[f"{name}."] = part.training
        for key, parameter in part.named_parameters(recurse=False):
            found[f"{name}.{key}"] = parameter.requires_grad
    return found


def _set(root: Parts, modes: Mapping[str, bool]) -> None:
    for name, part in root.named:
        part.training = modes.get(f"{name}.", part.training)
        for key, parameter in part.named_parameters(recurse=False):
            parameter.requires_grad_(modes.get(f"{name}.{key}", parameter.requires_grad))
