"""An island of a sea as the records tell it. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from holdfast.elastic.sea import dealing
from holdfast.elastic.sea.dealing import Blocks
from holdfast.elastic.sea.records import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class SeaMember:
    """An island of the sea.

    ``joined`` is the number of its `Entered`; ``weight`` its last known one. ``merged`` has for
    each portion the merges up to the last one that named the island: works of an older base hold
    what was merged already. ``bases`` are the newest bases that it stated, ``step_us`` the last
    microseconds of a step, 0 before.

    If the logbook deals samples, ``dealt`` are those that its lineage got so far, ``blocks`` the
    last of them, which some portion has not merged; ``trained`` has for each portion those that are
    merged. It wants to have ``need`` more than it trained.

    If islands meet in pairs, ``tide`` is that of its next meeting, and ``last`` are its works for
    the last merge, once its run is over.
    """

    joined: int
    lineage: int
    weight: int
    merged: tuple[int, ...]
    bases: tuple[int, ...]
    step_us: int = 0
    tide: int = 0
    last: tuple[Part, ...] = ()
    need: int = 0
    dealt: int = 0
    blocks: Blocks = ()
    trained: tuple[int, ...] = ()

    @property
    def merged_samples(self) -> int:
        """The samples of its lineage that every portion has merged."""
        return min(self.trained, default=0)

    def with_more(self, blocks: Blocks) -> SeaMember:
        """Return the member after it was dealt more."""
        dealt = self.dealt + dealing.count(blocks)
        return dataclasses.replace(
            self, dealt=dealt, blocks=dealing.joined((*self.blocks, *blocks))
        )

    def after_merge(self, portion: int, trained: int) -> SeaMember:
        """Return the member after a merge of the samples that it trained until then."""
        found = (*self.trained[:portion], trained, *self.trained[portion + 1 :])
        _, blocks = dealing.cut(self.blocks, min(found) - self.dealt + dealing.count(self.blocks))
        return dataclasses.replace(self, trained=found, blocks=blocks)
