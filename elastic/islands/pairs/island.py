"""A run as an island that meets others in pairs, and merges with all of them at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.elastic.channel.base import Channel, WorkerPhase
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.config import Settings
from holdfast.elastic.events import IslandLeft
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.islands.commands import (
    AdoptMerge,
    EnterAnew,
    GoOn,
    MergeLast,
    SendLast,
    SkipTides,
)
from holdfast.elastic.islands.island import Island
from holdfast.elastic.islands.life.adopting import adopt
from holdfast.elastic.islands.pairs.ending import PairEnding
from holdfast.elastic.islands.pairs.tensors import PairTensors
from holdfast.elastic.tracked.keeper import StateKeeper


class PairedIsland(Island):
    """As `Island`; the weights and momentum beside the parameters are this island's own."""

    def _tensors_of(self, state: Mapping[str, Any]) -> PairTensors:
        return PairTensors(state, self._parts.world, self._parts.islands)

    def _merge_all(self) -> None:
        """Take the mean of all islands' weights, once each of them has ended."""
        parts, tides, together = self._parts, self._tides, self._parts.together
        tensors = parts.tensors
        assert isinstance(tensors, PairTensors)
        parts.keeper.fence()
        ending = tides.arrival(PairEnding)
        with parts.pulse.phase(WorkerPhase.WAIT):
            while not isinstance(said := together.told(ending), GoOn):
                match said:
                    case AdoptMerge():
                        adopt(parts, self._contact, said)
                    case SkipTides():
                        tides.skip(said)
                    case EnterAnew():
                        self._entry.anew()
                        ending = tides.arrival(PairEnding)
                    case SendLast():
                        tides.depart(last=True)
                        parts.now.sents = []
                        self.kept()
                    case MergeLast():
                        tensors.merge_last(said.portion, said.weights, together.data)
                        together.data = []
        tensors.take_weights()
        parts.now.states = tensors.digests(range(parts.islands.portions))
        parts.emit(IslandLeft(island=parts.islands.name, why="done"))

    def _is_last_out(self) -> bool:
        """Return whether this island saves the weights: all have the same, and are here at once."""
        view = self._parts.logbook.view
        return not view.members and view.ended[-1:] in ((), (self._parts.islands.name,))


def island_of(
    channel: Channel,
    settings: Settings,
    world: GenerationWorld,
    *,
    pulse: Pulse,
    keeper: StateKeeper,
) -> Island | None:
    """Return the island of a run, as its topology needs it; None for a run that is none."""
    if settings.islands is None:
        return None
    kind = PairedIsland if settings.islands.topology == "pairs" else Island
    return kind(channel, settings, world, pulse=pulse, keeper=keeper)
