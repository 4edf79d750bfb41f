"""A run as an island: the work between its steps, on all ranks.

Everything happens at the end of a step, before its snapshot, so that every snapshot has one
consistent state: the sea's weights, the work under way and the numbers that belong to them.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from holdfast.ckpt import api
from holdfast.ckpt.checkpoints.catalog import committed
from holdfast.ckpt.errors import CkptError, StoreError
from holdfast.ckpt.store.places import open_store
from holdfast.elastic.channel.base import Channel, WorkerPhase
from holdfast.elastic.channel.pulse import Pulse
from holdfast.elastic.config import Settings
from holdfast.elastic.data.hand import Hand
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.events import (
    Event,
    IslandJoined,
    IslandLeft,
    TideAdopted,
    TidePublished,
    WeightsGiven,
)
from holdfast.elastic.groups.reform import GenerationWorld, host_of
from holdfast.elastic.islands.arriving import Arrival, Asking
from holdfast.elastic.islands.commands import (
    AdoptMerge,
    AwaitNews,
    EnterAnew,
    GiveWeights,
    GoOn,
    KeepModules,
    LoadWeights,
    SkipTides,
)
from holdfast.elastic.islands.counters import NONE, IslandCounters, Sent
from holdfast.elastic.islands.courier import Courier, Outgoing
from holdfast.elastic.islands.entering import Entrance, returning
from holdfast.elastic.islands.errands import Errands
from holdfast.elastic.islands.giving import Giving, remove_given
from holdfast.elastic.islands.haul.direct import Direct, sea_key
from holdfast.elastic.islands.haul.freight import Freight, Haul, on_thread
from holdfast.elastic.islands.haul.line import PacedLines
from holdfast.elastic.islands.held import HeldWorks
from holdfast.elastic.islands.logbook import SeaLogbook
from holdfast.elastic.islands.mailbox import Mailbox, digest_of
from holdfast.elastic.islands.messages import Given, Sign
from holdfast.elastic.islands.pace import OwnPace
from holdfast.elastic.islands.tensors import Merge, SeaTensors
from holdfast.elastic.islands.together import Decide, Said, Together
from holdfast.elastic.sea.records import Work
from holdfast.elastic.tracked.handover import Wish, wish_of
from holdfast.elastic.tracked.keeper import StateKeeper

_log = logging.getLogger(__name__)

KEY: Final = "holdfast-islands"
"""The name under which the island's state is tracked, next to the user's state."""

WEIGHTS: Final = "weights"
"""The folder below the meeting place with the weights at the end."""

_PROTECTED_WAIT_S: Final = 0.02


class Island:
    """One generation's part of an island.

    All ranks call `track`, `begin`, `end_step`, `kept` and `finish` in the same order; all of them
    but `track` are collective. ``hand`` are the samples that the logbook dealt to it, if it does.
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
        assert settings.islands is not None
        self._channel, self._settings, self._islands = channel, settings, settings.islands
        self._world, self._pulse, self._keeper = world, pulse, keeper
        self._counters = IslandCounters(self._islands.name, portions=self._islands.portions)
        self._tensors: SeaTensors | None = None
        self._store = open_store(self._islands.meet)
        self._mailbox = Mailbox(self._store, lines=PacedLines.of(*self._islands.bytes_per_s))
        self._logbook = SeaLogbook(self._store, island=self._islands.name)
        self._giving = Giving(self._mailbox, name=self._islands.name)
        self._together = Together(
            world,
            pulse,
            patience_s=self._islands.patience_s,
            wish=lambda: wish_of(channel, world),
        )
        key = self._islands.key
        self._sea_key = sea_key(key, run=channel.key) if key else None
        self._direct: Direct | None = None
        self._is_put_off = False
        self._pace = OwnPace(time.perf_counter)
        self._courier: Courier | None = None
        self._errands: Errands | None = None
        self._held = HeldWorks(steps=settings.held_steps)
        self._waits_since_s: float | None = None
        self._has_begun = False
        self.hand = Hand(lambda: self._counters.now) if self._islands.is_dealt else None
        if self.hand is not None:
            self.hand.refill = self._refill

    # -- the state -------------------------------------------------------------------------------

    def track(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is tracked beside ``state``: the sea's weights, and the work under way.

        Raises ``ConfigError`` for parameters that an island cannot merge.
        """
        self._tensors = tensors = self._tensors_of(state)
        return {
            KEY: {
                "weights": tensors.weights,
                "momentum": tensors.momentum,
                "payload": tensors.payload,
                "counters": self._counters,
            }
        }

    def _tensors_of(self, state: Mapping[str, Any]) -> SeaTensors:
        return SeaTensors(state, self._world, self._islands)

    # -- the begin -------------------------------------------------------------------------------

    def begin(self) -> Wish:
        """Enter the sea, or go on in it with the state that was restored.

        Return the wish for which an arrival was put off.
        """
        if self._has_begun:
            return Wish.NONE
        self._has_begun = True
        tensors, now = self._required(), self._counters.now
        with self._pulse.phase(WorkerPhase.WAIT):
            if now.lineage == NONE:
                self._enter(tensors)
            elif isinstance(self._together.settled(self._look), EnterAnew):
                self._counters.begin_anew(keeps=True)
                self._enter(tensors, keeps=True)
            elif self.hand is not None:
                self.hand.begin()
        self._open()
        self._held.put(
            self._outgoing(sent, tensors.payload_of(sent.portion).numpy().tobytes())
            for sent in now.sents
        )
        self.kept()
        if self._is_due():
            self._is_put_off = not self._arrive(tensors, may_put_off=True)
        return self.wished

    def _look(self) -> Said:
        """Read the logbook. Raises ``SeaError`` if it is not the one that the state is from."""
        if self._counters.now.place and not self._logbook.view.length:
            self._logbook.resume(self._counters.now.place)
        self._logbook.poll()
        said = returning(
            self._logbook,
            self._islands,
            lineage=self._counters.now.lineage,
            run=self._channel.run,
            sign=lambda: self._mailbox.sign(self._islands.name),
        )
        return said, []

    def _enter(self, tensors: SeaTensors, *, keeps: bool = False) -> None:
        """Get the sea's weights and join it; with ``keeps`` the state has them."""
        began_s, now, batch = time.perf_counter(), self._counters.now, self._settings.batch
        hand = self.hand
        if not keeps:
            tensors.begin()
        now.need = self._need()
        entrance = Entrance(
            self._logbook,
            self._mailbox,
            self._islands,
            parameters=tensors.parameters,
            first=tensors.digest_of_weights(),
            weight=self._islands.every * batch.microbatches * batch.size,
            run=self._channel.run,
            clock=time.monotonic,
            adopted=now.adopted if keeps else None,
            dealt=None if hand is None else hand.data,
            need=now.need,
        )
        now.states = tensors.digests(range(self._islands.portions))
        how, roots = "kept" if keeps else "built", list[str]()
        while not isinstance(said := self._together.told(entrance.next), GoOn):
            match said:
                case LoadWeights():
                    how, roots = "given", [*roots, said.root]
                    self._load(tensors, said)
                case AdoptMerge():
                    self._adopt(tensors, said)
                case _:
                    self._together.pause()
        if said.tide > now.adopted:  # in pairs it takes part from now on, whatever it was given
            self._counters.skip_to(said.tide, step=self._keeper.cursor.step)
        now.lineage, now.entered, now.place = said.lineage, now.adopted, said.place
        now.departs = self._keeper.cursor.step + self._islands.stride
        if hand is not None:
            hand.begin(said.dealt)
        tensors.take_weights()
        for root in roots if self._world.rank == 0 else ():
            remove_given(root)
        self._emit(
            IslandJoined(
                island=self._islands.name,
                tide=now.adopted,
                lineage=now.lineage,
                how=how,
                seconds=time.perf_counter() - began_s,
            )
        )

    def _load(self, tensors: SeaTensors, said: LoadWeights) -> None:
        """Take the weights that another island gave."""
        now = self._counters.now
        tensors.load(functools.partial(api.load, said.root))
        now.adopted, now.bases, now.named = said.tide, list(said.bases), list(said.bases)
        now.states = tensors.digests(range(self._islands.portions))

    def _need(self) -> int:
        """Return the samples that cover the steps to the next tide, its overlap, and one more."""
        if self.hand is None:
            return 0
        _ = self.hand.data  # refuses a run without a loader
        steps = self._islands.stride + self._islands.overlap + 1 + self.hand.ahead
        return steps * self.hand.batch

    def _refill(self) -> None:
        """Ask the logbook for samples if the next step has too few; collective.

        In a sea that nothing disturbs a merge has dealt them before.
        """
        hand, now = self.hand, self._counters.now
        if hand is None or hand.is_over or hand.left >= hand.batch:
            return
        with self._pulse.phase(WorkerPhase.WAIT):
            said = self._together.settled(self._ask(upto=hand.taken + now.need))
        match said:
            case GoOn():
                hand.receive(said.dealt)
            case EnterAnew():
                self._keeper.fence()
                self._enter_anew(self._required(), keeps=said.keeps)

    def _ask(self, *, upto: int) -> Decide:
        """Return the decisions of rank 0 while it asks for samples."""
        errands = self._errands
        if errands is None:
            return _unasked
        return Asking(
            errands.courier,
            upto=upto,
            dealt=lambda: self._counters.now.dealt,
            await_news=errands.await_news,
            check=errands.check,
        ).next

    def _enter_anew(self, tensors: SeaTensors, *, keeps: bool = False) -> None:
        """Enter the sea with its weights; own work that is not merged is dropped."""
        why = "was put out" if keeps else "has fallen too far behind"
        _log.warning("the island %s %s: it enters anew", self._islands.name, why)
        self._end_errands()
        self._held.clear()
        if not keeps:
            self._logbook = SeaLogbook(self._store, island=self._islands.name)  # from its begin
        self._counters.begin_anew(keeps=keeps)
        with self._pulse.phase(WorkerPhase.WAIT):
            self._enter(tensors, keeps=keeps)
        self._open()

    def _open(self) -> None:
        """Start the courier at rank 0, and serve its payloads to the other islands."""
        if self._world.rank:
            return
        if self._sea_key is not None and self._direct is None:
            self._direct = Direct(
                self._sea_key,
                host=host_of(self._channel.sidecar),
                place=self._islands.place,
                lines=self._mailbox.lines,
                digest_of=digest_of,
                patience_s=self._islands.patience_s,
            )
        self._courier = Courier(
            self._logbook,
            self._mailbox,
            self._islands,
            lineage=self._counters.now.lineage,
            clock=time.monotonic,
            protected=self._is_protected,
            sign=self._sign,
            told=self._tell_published,
            remove=remove_given,
            freight=Freight(
                self._mailbox, lines=self._mailbox.lines, peers=self._direct, submit=on_thread
            ),
        )
        if self._direct is not None:
            self._direct.address_of = self._courier.address
        self._errands = Errands(self._courier, patience_s=self._islands.patience_s)

    def _is_protected(self, step: int) -> bool:
        try:
            reached = self._keeper.client.protected_step(
                generation=self._world.generation, at_least=step, timeout_s=_PROTECTED_WAIT_S
            )
        except CkptError:
            return False  # the generation ends, or the sidecar is busy
        return reached >= step

    def _sign(self, number: int) -> Sign:
        """Return a sign of life; called on the courier's thread."""
        since_s = self._waits_since_s
        return Sign(
            island=self._islands.name,
            run=self._channel.run,
            number=number,
            needs=self._needs(),
            step=self._keeper.cursor.step,
            tide=self._counters.now.adopted,
            waiting_s=0.0 if since_s is None else time.monotonic() - since_s,
            sent_bytes=self._mailbox.sent,
            fetched_bytes=self._mailbox.fetched,
            step_s=self._pace.recent_s,
            line=self._mailbox.lines.figures,
            address="" if self._direct is None else self._direct.address,
        )

    def _needs(self) -> int:
        """Return the oldest tide that a state to which this island may go back has not adopted."""
        held = self._settings.held_steps
        if self._settings.checkpoint is None:
            step = self._keeper.protection().step
        else:
            try:
                step = self._keeper.client.durable_step()
            except CkptError:
                step = -1
        return self._counters.adopted_at(step - held)

    def _tell_published(self, work: Work, seconds: float) -> None:
        self._channel.emit(
            TidePublished(
                tide=work.tide,
                portion=work.portion,
                weight=work.weight,
                bytes=work.nbytes,
                sent_bytes=self._mailbox.sent,
                seconds=seconds,
            )
        )

    # -- the end of a step -----------------------------------------------------------------------

    def end_step(self, *, last: bool, samples: int) -> bool:
        """Do what is due after a step that the cursor counts; return whether to take a snapshot.

        ``samples`` are those that all ranks trained in the step.
        """
        tensors, now, step = self._required(), self._counters.now, self._keeper.cursor.step
        now.samples += samples
        self._pace.end_step()
        if last:
            self._held.end()
        self._release()
        if self._is_due() or (last and now.sents):
            self._is_put_off = not self._arrive(tensors, may_put_off=not last)
        departs = self._counters.departs(step, self._islands) and not last
        if last:
            self._merge_all(tensors)
        elif departs:
            self._depart(tensors)
        if not last:
            self._refill()
        tensors.tell_touched(self._keeper.touched)
        return departs or self._is_put_off

    @property
    def wished(self) -> Wish:
        """The wish for which an arrival was put off at this step: it comes after the change."""
        return self._together.wished if self._is_put_off else Wish.NONE

    @property
    def is_idle(self) -> bool:
        """True if the logbook has no samples for this island any more, in any epoch."""
        return self.hand is not None and self.hand.is_empty

    def resume(self) -> None:
        """Make up for an arrival that was put off: the world has not changed."""
        if self._is_put_off:
            self._is_put_off = False
            self._arrive(self._required())

    def _is_due(self) -> bool:
        """Return whether the merge of the work under way belongs to the end of this step."""
        sents, step = self._counters.now.sents, self._keeper.cursor.step
        return bool(sents) and step >= sents[0].step + self._islands.overlap

    def kept(self) -> None:
        """Publish the works of this step as soon as its snapshot is protected; the next begins.

        Those that the loss guard may still undo are held back.
        """
        self._release()
        self._pace.begin_step()

    def _release(self) -> None:
        """Give the courier the works that no loss guard undoes any more."""
        due = self._held.due(self._keeper.cursor.step)
        if due and self._errands is not None:
            self._errands.courier.send(due)
            self._errands.call()

    def _merge_all(self, tensors: SeaTensors) -> None:
        """Merge every portion once more; then the sea's weights are the parameters."""
        for _ in range(self._islands.portions):
            self._depart(tensors)
            self.kept()
            self._arrive(tensors, hurries=True)
        tensors.take_weights()
        self._counters.now.over = True

    def _skip(self, said: SkipTides) -> None:
        """Go on at a later tide; own work that is not merged stays."""
        self._counters.skip_to(said.tide, step=self._keeper.cursor.step)
        if self._errands is not None:
            self._errands.courier.adopted(said.tide - 1)

    def _depart(self, tensors: SeaTensors, *, last: bool = False) -> None:
        """Take the progress of the portions that are due as works of the next tides.

        ``last``: of all portions, for the last merge.
        """
        self._keeper.fence()
        step, step_us = self._keeper.cursor.step, self._step_us()
        for portion in range(self._islands.portions) if last else self._counters.due():
            payload = tensors.encode(portion)
            sent = self._counters.note_departed(
                portion,
                step=step,
                digest=digest_of(payload),
                nbytes=len(payload),
                step_us=step_us,
            )
            self._held.put([self._outgoing(sent, payload, last=last)])

    def _step_us(self) -> int:
        """Return the microseconds of a step of late, as rank 0 measured them; collective."""
        if self._islands.least_every is None:
            return 0
        (first, *_) = self._world.gather(self._pace.take_us())
        return int(first)

    def _outgoing(self, sent: Sent, payload: bytes, *, last: bool = False) -> Outgoing:
        work = self._counters.work_of(sent, last=last)
        return Outgoing(work=work, payload=payload, step=sent.step)

    def _arrive(
        self, tensors: SeaTensors, *, hurries: bool = False, may_put_off: bool = False
    ) -> bool:
        """Adopt the merge of the work under way, with a quorum every later one too.

        Return False if it ``may_put_off``, the merge is not there, and a rank wishes that the step
        ends: then the next generation begins with this.
        """
        self._keeper.fence()
        began_s, first = time.perf_counter(), self._counters.now.adopted
        self._waits_since_s = time.monotonic()
        arrival = self._arrival(Arrival, hurries=hurries)
        with self._pulse.phase(WorkerPhase.WAIT):
            while not isinstance(said := self._together.told(arrival), GoOn):
                match said:
                    case AdoptMerge():
                        self._adopt(tensors, said, waited_s=time.perf_counter() - began_s)
                        began_s = time.perf_counter()
                    case GiveWeights():
                        self._give(tensors, said)
                    case EnterAnew():
                        self._enter_anew(tensors, keeps=said.keeps)
                        first = self._counters.now.adopted
                        break
                    case SkipTides():
                        self._skip(said)
                        break
                    case AwaitNews() if may_put_off and self._together.wished:
                        self._waits_since_s = None
                        return False
        self._waits_since_s = None
        if self.hand is not None and isinstance(said, GoOn):
            self.hand.receive(said.dealt)
        several = self._islands.wait != "all"
        self._counters.note_arrived(
            self._counters.now.adopted - first if several else 1,
            place=said.place if isinstance(said, GoOn) else "",
            stride=said.stride if isinstance(said, GoOn) else 0,
        )
        return True

    def _arrival(self, kind: type[Arrival], *, hurries: bool = False) -> Decide:
        """Return the decisions of an arrival, which rank 0 makes."""
        errands, counters = self._errands, self._counters
        if errands is None:
            return _unasked
        return kind(
            errands.courier,
            self._islands,
            adopted=lambda: counters.now.adopted,
            weight=counters.weight(counters.now.adopted % self._islands.portions),
            await_news=errands.await_news,
            check=errands.check,
            clock=time.monotonic,
            nbytes=self._required().nbytes,
            dealt=lambda: counters.now.dealt,
            hurries=hurries,
        ).next

    def _adopt(self, tensors: SeaTensors, said: AdoptMerge, *, waited_s: float = 0.0) -> None:
        merge = Merge(portion=said.portion, weights=said.weights, whole=said.whole, own=said.own)
        tensors.adopt(merge, self._together.data)
        self._together.data = []
        (state,) = tensors.digests([said.portion])
        step, named = self._keeper.cursor.step, said.own >= 0
        self._counters.note_adopted(said.portion, state=state, step=step, named=named)
        moved = Haul()
        if self._errands is not None:
            moved = self._errands.courier.adopted(said.tide)
        self._emit(
            TideAdopted(
                tide=said.tide,
                portion=said.portion,
                step=step,
                islands=len(said.weights),
                whole=said.whole,
                named=named,
                state=state,
                waited_s=waited_s,
                fetched_bytes=self._mailbox.fetched,
                bytes=moved.fetched_bytes,
                seconds=moved.seconds,
                direct_bytes=moved.direct_bytes,
            )
        )

    def _give(self, tensors: SeaTensors, said: GiveWeights) -> None:
        """Save the sea's weights for an island that asked for them."""
        began_s, now = time.perf_counter(), self._counters.now
        state = {"weights": tensors.weights, "momentum": tensors.momentum}
        given = Given(by=self._islands.name, tide=now.adopted, bases=tuple(now.bases))
        try:
            api.save(said.root, state, step=now.adopted)
            if self._world.rank == 0:
                self._giving.answer(said.request, given, root=said.root)
        except (StoreError, OSError) as error:
            _log.warning("the weights cannot be given now; trying again: %s", error)
            self._together.pause()
            return
        seconds = time.perf_counter() - began_s
        self._emit(WeightsGiven(island=said.request.island, tide=now.adopted, seconds=seconds))

    # -- the end of the run ----------------------------------------------------------------------

    def finish(self) -> None:
        """Leave the sea: the run is over, and its last step durable.

        The last island to leave saves the run's modules at the meeting place.
        """
        if not self._has_begun:
            return
        with self._pulse.phase(WorkerPhase.WAIT):
            if isinstance(said := self._together.settled(self._leave), KeepModules):
                api.save(said.root, self._required().modules, step=self._keeper.cursor.step)

    def _leave(self) -> Said:
        self._end_errands()
        self._giving.tidy()
        if self._courier is not None and self._courier.leave():
            self._emit(IslandLeft(island=self._islands.name, why="done"))
        root = self._store.where(WEIGHTS)
        if not self._is_last_out() or committed(open_store(root)):
            return GoOn(), []
        return KeepModules(root=root), []

    def _is_last_out(self) -> bool:
        return not self._logbook.view.members

    def close(self) -> None:
        """Stop the courier, and release the tensors."""
        self._close_errands()
        if self._direct is not None:
            self._direct.close()
            self._direct = None
        self._tensors = None

    def _end_errands(self) -> None:
        """Stop the courier, so that nobody else uses the logbook from now on."""
        if self._errands is not None and not self._errands.end(self._islands.patience_s):
            raise StoreError(
                f"{self._islands.meet}: a call has not come back for {self._islands.patience_s:g} "
                "s; check the store, then start again"
            )
        self._errands = None

    def _close_errands(self) -> None:
        errands, self._errands = self._errands, None
        if errands is not None:
            errands.close()

    def _emit(self, event: Event) -> None:
        if self._world.rank == 0:
            self._channel.emit(event)

    def _required(self) -> SeaTensors:
        if self._tensors is None:
            raise ConfigError("call run.track(model=..., optimizer=...) before the first step")
        return self._tensors


def _unasked() -> Said:
    """Stand for the decisions of rank 0 at other ranks, where nobody asks for them."""
    return GoOn(), []
