"""The things that the parts of an island's life have in common, for one generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.places import open_store
from holdfast.elastic.channel.base import Channel
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.config import Settings
from holdfast.elastic.data.hand import Hand
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import Event
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.islands.counters import IslandCounters, IslandNumbers
from holdfast.elastic.islands.haul.line import PacedLines
from holdfast.elastic.islands.logbook import SeaLogbook
from holdfast.elastic.islands.mailbox import Mailbox
from holdfast.elastic.islands.tensors import SeaTensors
from holdfast.elastic.islands.together import Together
from holdfast.elastic.sea.settings import Islands
from holdfast.elastic.tracked.handover import wish_of
from holdfast.elastic.tracked.keeper import StateKeeper


@dataclass(slots=True, kw_only=True)
class IslandParts:
    """One generation's parts.

    ``hand`` are the samples that the logbook dealt to the island, if it does. ``logbook`` is
    another one after the island entered anew; ``tracked`` are the tensors from `Run.track` on.
    """

    channel: Channel
    settings: Settings
    islands: Islands
    world: GenerationWorld
    pulse: Pulse
    keeper: StateKeeper
    store: Store
    mailbox: Mailbox
    logbook: SeaLogbook
    together: Together
    counters: IslandCounters
    hand: Hand | None
    tracked: SeaTensors | None = None

    @classmethod
    def of(
        cls,
        channel: Channel,
        settings: Settings,
        world: GenerationWorld,
        *,
        pulse: Pulse,
        keeper: StateKeeper,
    ) -> Self:
        """Return the parts of an island whose settings these are."""
        islands = settings.islands
        assert islands is not None
        counters = IslandCounters(islands.name, portions=islands.portions)
        store = open_store(islands.meet)
        return cls(
            channel=channel,
            settings=settings,
            islands=islands,
            world=world,
            pulse=pulse,
            keeper=keeper,
            store=store,
            mailbox=Mailbox(store, lines=PacedLines.of(*islands.bytes_per_s)),
            logbook=SeaLogbook(store, island=islands.name),
            together=Together(
                world,
                pulse,
                patience_s=islands.patience_s,
                wish=lambda: wish_of(channel, world),
            ),
            counters=counters,
            hand=Hand(lambda: counters.now) if islands.is_dealt else None,
        )

    @property
    def tensors(self) -> SeaTensors:
        """The sea's tensors on this rank. Raises ``ConfigError`` before there are any."""
        if self.tracked is None:
            raise ConfigError("call run.track(model=..., optimizer=...) before the first step")
        return self.tracked

    @property
    def now(self) -> IslandNumbers:
        """The island's numbers."""
        return self.counters.now

    @property
    def step(self) -> int:
        """The number of complete steps."""
        return self.keeper.cursor.step

    def read_anew(self) -> None:
        """Read the logbook from its begin."""
        self.logbook = SeaLogbook(self.store, island=self.islands.name)

    def emit(self, event: Event) -> None:
        """Record an event, once for all ranks."""
        if self.world.rank == 0:
            self.channel.emit(event)
