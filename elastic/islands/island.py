"""A run as an island: the work between its steps, on all ranks.

Everything happens at the end of a step, before its snapshot, so that every snapshot has one
consistent state: the sea's weights, the work under way and the numbers that belong to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from holdfast.ckpt import api
from holdfast.ckpt.checkpoints.catalog import committed
from holdfast.ckpt.store.places import open_store
from holdfast.elastic.channel.base import Channel, WorkerPhase
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.config import Settings
from holdfast.elastic.data.hand import Hand
from holdfast.elastic.events import IslandLeft
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.islands.commands import GoOn, KeepModules
from holdfast.elastic.islands.life.contact import Contact
from holdfast.elastic.islands.life.entry import SeaEntry
from holdfast.elastic.islands.life.parts import IslandParts
from holdfast.elastic.islands.life.tides import Tides
from holdfast.elastic.islands.tensors import SeaTensors
from holdfast.elastic.islands.together import Said
from holdfast.elastic.tracked.handover import Wish
from holdfast.elastic.tracked.keeper import StateKeeper

KEY: Final = "holdfast-islands"
"""The name under which the island's state is tracked, next to the user's state."""

WEIGHTS: Final = "weights"
"""The folder below the meeting place with the weights at the end."""


class Island:
    """One generation's part of an island.

    All ranks call `track`, `begin`, `end_step`, `kept` and `finish` in the same order; all of them
    but `track` are collective.
    """

    def __init__(
        self,
        channel: Channel,
        settings: Settings,
        world: GenerationWorld,
        *,
        pulse: Pulse,
        keeper: StateKeeper,
    ) -> None:
        self._parts = IslandParts.of(channel, settings, world, pulse=pulse, keeper=keeper)
        self._contact = Contact(self._parts)
        self._entry = SeaEntry(self._parts, self._contact)
        self._tides = Tides(self._parts, self._contact, self._entry)
        self._is_put_off = self._has_begun = False

    @property
    def hand(self) -> Hand | None:
        """The samples that the logbook dealt to the island, None if it deals none."""
        return self._parts.hand

    def track(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is tracked beside ``state``: the sea's weights, and the work under way.

        Raises ``ConfigError`` for parameters that an island cannot merge.
        """
        self._parts.tracked = tensors = self._tensors_of(state)
        return {
            KEY: {
                "weights": tensors.weights,
                "momentum": tensors.momentum,
                "payload": tensors.payload,
                "counters": self._parts.counters,
            }
        }

    def _tensors_of(self, state: Mapping[str, Any]) -> SeaTensors:
        return SeaTensors(state, self._parts.world, self._parts.islands)

    def begin(self) -> Wish:
        """Enter the sea, or go on in it with the state that was restored.

        Return the wish for which an arrival was put off.
        """
        if self._has_begun:
            return Wish.NONE
        self._has_begun = True
        _ = self._parts.tensors
        self._entry.begin()
        self._tides.hold_restored()
        self.kept()
        if self._tides.is_due:
            self._is_put_off = not self._tides.arrive(may_put_off=True)
        return self.wished

    # -- the end of a step -----------------------------------------------------------------------

    def end_step(self, *, last: bool, samples: int) -> bool:
        """Do what is due after a step that the cursor counts; return whether to take a snapshot.

        ``samples`` are those that all ranks trained in the step. Raises ``NotFiniteError`` for
        progress that cannot be sent.
        """
        parts, tides, now = self._parts, self._tides, self._parts.now
        now.samples += samples
        self._contact.pace.end_step()
        self._contact.release(all_=last)
        if tides.is_due or (last and now.sents):
            self._is_put_off = not tides.arrive(may_put_off=not last)
        departs = parts.counters.departs(parts.step, parts.islands) and not last
        if last:
            self._merge_all()
        else:
            if departs:
                tides.depart()
            self._entry.refill()
        parts.tensors.tell_touched(parts.keeper.touched)
        return departs or self._is_put_off

    @property
    def wished(self) -> Wish:
        """The wish for which an arrival was put off at this step: it comes after the change."""
        return self._parts.together.wished if self._is_put_off else Wish.NONE

    @property
    def is_idle(self) -> bool:
        """True if the logbook has no samples for this island any more, in any epoch."""
        return self.hand is not None and self.hand.is_empty

    def resume(self) -> None:
        """Make up for an arrival that was put off: the world has not changed."""
        if self._is_put_off:
            self._is_put_off = False
            self._tides.arrive()

    def kept(self) -> None:
        """Publish the works of this step as soon as its snapshot is protected; the next begins.

        Those that the loss guard may still undo are held back.
        """
        self._contact.release()
        self._contact.pace.begin_step()

    def _merge_all(self) -> None:
        """Merge every portion once more; then the sea's weights are the parameters."""
        for _ in range(self._parts.islands.portions):
            self._tides.depart()
            self.kept()
            self._tides.arrive(hurries=True)
        self._parts.tensors.take_weights()
        self._parts.now.over = True

    # -- the end of the run ----------------------------------------------------------------------

    def finish(self) -> None:
        """Leave the sea: the run is over, and its last step durable.

        The last island to leave saves the run's modules at the meeting place.
        """
        if not self._has_begun:
            return
        parts = self._parts
        with parts.pulse.phase(WorkerPhase.WAIT):
            if isinstance(said := parts.together.settled(self._leave), KeepModules):
                api.save(said.root, parts.tensors.modules, step=parts.step)

    def _leave(self) -> Said:
        parts, contact = self._parts, self._contact
        contact.end()
        self._tides.giving.tidy()
        if contact.courier is not None and contact.courier.leave():
            parts.emit(IslandLeft(island=parts.islands.name, why="done"))
        root = parts.store.where(WEIGHTS)
        if not self._is_last_out() or committed(open_store(root)):
            return GoOn(), []
        return KeepModules(root=root), []

    def _is_last_out(self) -> bool:
        return not self._parts.logbook.view.members

    def close(self) -> None:
        """Stop the courier, and release the tensors."""
        self._contact.close()
        self._parts.tracked = None
