"""The groups that a run takes from others: recorded before their step, each taken once. Pure.

A step's groups are recorded while the step before it is under way, so the snapshot that the step
begins from has them: a restart trains on the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from holdfast.adapters.rl.ledger.states import LedgerError
from holdfast.adapters.rl.samples.borrowed import Borrowed, GroupOrigin
from holdfast.ckpt.types import Json

REMEMBERED: Final = 4096
"""The most ordinals of a run that are remembered as taken; none below the lowest is taken then."""


@dataclass(slots=True, kw_only=True)
class TakenOrdinals:
    """The ordinals of one run that were taken: ``ordinals``, and none below ``below`` any more."""

    below: int = 0
    ordinals: set[int] = field(default_factory=set)

    def has(self, ordinal: int) -> bool:
        """Say whether an ordinal was taken, or is too old to know."""
        return ordinal < self.below or ordinal in self.ordinals

    def add(self, ordinal: int) -> None:
        """Count an ordinal as taken."""
        self.ordinals.add(ordinal)
        while len(self.ordinals) > REMEMBERED:
            lowest = min(self.ordinals)
            self.ordinals.remove(lowest)
            self.below = lowest + 1


class Borrowing:
    """The groups recorded for the next step, and the origins of all that were ever recorded."""

    def __init__(self) -> None:
        self._step, self._groups = 0, tuple[tuple[Borrowed, ...], ...]()
        self._taken: dict[tuple[str, str], TakenOrdinals] = {}

    def may_take(self, origin: GroupOrigin) -> bool:
        """Say whether a group was not taken before."""
        taken = self._taken.get((origin.island, origin.lineage))
        return taken is None or not taken.has(origin.ordinal)

    def record(self, groups: Sequence[Sequence[Borrowed]], *, step: int) -> None:
        """Record the groups that ``step`` borrows.

        Raises ``LedgerError`` for one that was taken before, and while others wait to be trained.
        """
        if self._groups:
            raise LedgerError(
                f"step {step} would borrow before step {self._step} trained on its {self.waiting} "
                "borrowed groups"
            )
        for group in groups:
            origin = group[0].origin
            if not self.may_take(origin):
                raise LedgerError(f"group {origin} was borrowed before; step {step} cannot take it")
            taken = self._taken.setdefault((origin.island, origin.lineage), TakenOrdinals())
            taken.add(origin.ordinal)
        self._step, self._groups = step, tuple(tuple(group) for group in groups)

    def due(self, step: int) -> list[Borrowed]:
        """Return the samples that ``step`` borrows, group by group."""
        if step != self._step:
            return []
        return [sample for group in self._groups for sample in group]

    def recorded(self, step: int) -> frozenset[GroupOrigin]:
        """Return the origins of the groups that ``step`` borrows."""
        return frozenset(sample.origin for sample in self.due(step))

    @property
    def waiting(self) -> int:
        """Number of groups that are borrowed and not trained."""
        return len(self._groups)

    def train(self, step: int) -> int:
        """Let the groups of ``step`` go: it trained on them; return their number."""
        count = len(self._groups) if step == self._step else 0
        if count:
            self._groups = ()
        return count

    def state_dict(self) -> dict[str, Json]:
        """Return everything as JSON values."""
        return {
            "step": self._step,
            "groups": [
                [msgspec.json.encode(sample).decode() for sample in group] for group in self._groups
            ],
            "taken": [
                [island, lineage, each.below, sorted(each.ordinals)]
                for (island, lineage), each in self._taken.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Replace everything by what ``state_dict`` returned."""
        self._step = state["step"]
        self._groups = tuple(
            tuple(msgspec.json.decode(text, type=Borrowed) for text in group)
            for group in state["groups"]
        )
        self._taken = {
            (island, lineage): TakenOrdinals(below=below, ordinals=set(ordinals))
            for island, lineage, below, ordinals in state["taken"]
        }
