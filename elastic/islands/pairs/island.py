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
from holdfast.elastic.islands.pairs.ending import PairEnding
from holdfast.elastic.islands.pairs.tensors import PairTensors
from holdfast.elastic.islands.tensors import SeaTensors
from holdfast.elastic.tracked.keeper import StateKeeper


class PairedIsland(Island):
    """As `Island`; the weights and momentum beside the parameters are this island's own."""

    def _tensors_of(self, state: Mapping[str, Any]) -> PairTensors:
        return PairTensors(state, self._world, self._islands)

    def _merge_all(self, tensors: SeaTensors) -> None:
        """Take the mean of all islands' weights, once each of them has ended."""
        assert isinstance(tensors, PairTensors)
        self._keeper.fence()
        ending = self._arrival(PairEnding)
        with self._pulse.phase(WorkerPhase.WAIT):
            while not isinstance(said := self._together.told(ending), GoOn):
                match said:
                    case AdoptMerge():
                        self._adopt(tensors, said)
                    case SkipTides():
                        self._skip(said)
                    case EnterAnew():
                        self._enter_anew(tensors)
                        ending = self._arrival(PairEnding)
                    case SendLast():
                        self._depart(tensors, last=True)
                        self._counters.now.sents = []
                        self.kept()
                    case MergeLast():
                        tensors.merge_last(said.portion, said.weights, self._together.data)
                        self._together.data = []
        tensors.take_weights()
        self._counters.now.states = tensors.digests(range(self._islands.portions))
        self._emit(IslandLeft(island=self._islands.name, why="done"))

    def _is_last_out(self) -> bool:
        """Return whether this island saves the weights: all have the same, and are here at once."""
        view = self._logbook.view
        return not view.members and view.ended[-1:] in ((), (self._islands.name,))


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
