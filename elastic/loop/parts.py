"""The parts of a `Run` that its passes, its updates and its steps have in common."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.elastic.channel.base import Channel
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.config import Settings
from holdfast.elastic.data.work import StepWork
from holdfast.elastic.gradients.metrics import Metrics
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.islands.island import Island
from holdfast.elastic.loop.loss_watch import LossWatch
from holdfast.elastic.loop.session import Session
from holdfast.elastic.loop.updates.place import LoopPlace
from holdfast.elastic.loop.updates.watch import UpdateWatch
from holdfast.elastic.tracked.keeper import StateKeeper


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """One generation's parts."""

    channel: Channel
    session: Session
    settings: Settings
    world: GenerationWorld
    pulse: Pulse
    keeper: StateKeeper
    place: LoopPlace
    logs: Metrics
    work: StepWork
    watch: UpdateWatch
    losses: LossWatch | None
    island: Island | None = None

    def check(self) -> None:
        """Show progress; raise ``GenerationOverError`` if this generation is over."""
        self.pulse.beat()
        self.world.guard.check()
