"""A watch over the generators of the script's own: a microbatch must not draw from them.

Nobody restores such a generator, and every rank runs other microbatches. So its numbers depend on
failures and on the number of ranks. The first passes of each phase are watched, and only those.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any, Final

import torch

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.updates.generators import FoundGenerator, held_by, reached_from
from holdfast.elastic.seeding import every_named
from holdfast.elastic.tracked.generators import global_generators, state_of, was_seeded

_PASSES: Final = 2
"""Passes of each phase that are watched."""

_MOST: Final = 64
"""Generators that are watched; beyond, their states would take long."""


class DrawWatch:
    """The generators of a run's function that are not tracked and not the run's, in its bodies.

    ``state`` is the tracked state: its generators follow rules of their own. A generator that is
    seeded anew in every body is right, whatever it draws. So it takes a second body that moves a
    generator on to refuse it: if it got the same seed in each, the second ends as the first did.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._passes: dict[int, int] = {}
        self._is_on, self._found = False, list[FoundGenerator]()
        self._searched = False
        self._before: list[object] = []
        self._moved: dict[int, FoundGenerator] = {}
        self._seeded: dict[int, FoundGenerator] = {}

    def begin_pass(self, *, phase: int) -> None:
        """Note that a pass begins."""
        count = self._passes.get(phase, 0)
        self._passes[phase] = count + 1
        self._is_on, self._searched, self._found, self._before = count < _PASSES, False, [], []

    def begin_body(self, frame: FrameType | None) -> None:
        """Note the states before a body, which runs in the user's ``frame``."""
        if not self._is_on:
            return
        if not self._searched:
            self._searched = True
            ours = [*global_generators(), *every_named()]
            known = held_by(self._state.values()) | {id(each) for each in ours}
            found = [each for each in reached_from(frame) if id(each.generator) not in known]
            self._found = found[:_MOST]
        self._before = [state_of(each.generator) for each in self._found]

    def end_body(self, microbatch: int) -> None:
        """Raise ``ConfigError`` if the body of this microbatch moved a generator on."""
        if not self._is_on or not self._found:
            return
        for found, before in zip(self._found, self._before, strict=False):
            key, after = id(found.generator), state_of(found.generator)
            if after == before or key in self._seeded:
                continue
            if was_seeded(found.generator, before=before, after=after):
                self._seeded[key] = found
            elif key in self._moved:
                raise ConfigError(_refusal(found, microbatch))
            self._moved[key] = found
        self._before = []

    def end_pass(self) -> None:
        """Forget what was found, so that nothing of the user's is kept alive."""
        self._found, self._before = [], []
        if self._is_over:
            self._moved, self._seeded = {}, {}

    @property
    def _is_over(self) -> bool:
        return all(count >= _PASSES for count in self._passes.values())


def _refusal(found: FoundGenerator, microbatch: int) -> str:
    name = found.name.rpartition(".")[2].partition("[")[0] or found.name
    if isinstance(found.generator, torch.Generator):
        instead = f"draw from run.generator({name!r})"
    else:
        kind = type(found.generator)
        new = "numpy.random.default_rng" if kind.__module__ != "random" else "random.Random"
        instead = f"make it anew there, as {name} = {new}(torch.initial_seed())"
    return (
        f"generator `{found.name}` of the script, used at {found.at}, was drawn from inside "
        f"microbatch {microbatch}. Nothing restores it, and every rank runs other microbatches, so "
        "its numbers would depend on failures and on the number of ranks. In a microbatch "
        f"{instead}, or draw from the global generators, which the run seeds there. A generator "
        f"that goes on from step to step is drawn from between passes and belongs in "
        f"run.track({name if name.isidentifier() else 'generator'}=...)"
    )
