"""An island's entry into the sea on all ranks, and the samples that it is dealt there."""

from __future__ import annotations

import functools
import logging
import time

from holdfast.ckpt import api
from holdfast.elastic.channel.base import WorkerPhase
from holdfast.elastic.events import IslandJoined
from holdfast.elastic.islands.arriving import Asking
from holdfast.elastic.islands.commands import AdoptMerge, EnterAnew, GoOn, LoadWeights
from holdfast.elastic.islands.counters import NONE
from holdfast.elastic.islands.entering import Entrance, returning
from holdfast.elastic.islands.giving import remove_given
from holdfast.elastic.islands.life.adopting import adopt
from holdfast.elastic.islands.life.contact import Contact
from holdfast.elastic.islands.life.parts import IslandParts
from holdfast.elastic.islands.together import Decide, Said, unasked

_log = logging.getLogger(__name__)


class SeaEntry:
    """One generation's entries; all methods are collective."""

    def __init__(self, parts: IslandParts, contact: Contact) -> None:
        self._p, self._contact = parts, contact
        if parts.hand is not None:
            parts.hand.refill = self.refill

    def begin(self) -> None:
        """Enter the sea, or go on in it with the state that was restored."""
        p = self._p
        with p.pulse.phase(WorkerPhase.WAIT):
            if p.now.lineage == NONE:
                self._enter()
            elif isinstance(p.together.settled(self._look), EnterAnew):
                p.counters.begin_anew(keeps=True)
                self._enter(keeps=True)
            elif p.hand is not None:
                p.hand.begin()
        self._contact.open()

    def anew(self, *, keeps: bool = False) -> None:
        """Enter the sea with its weights; own work that is not merged is dropped."""
        p = self._p
        why = "was put out" if keeps else "has fallen too far behind"
        _log.warning("the island %s %s: it enters anew", p.islands.name, why)
        self._contact.give_up()
        if not keeps:
            p.read_anew()
        p.counters.begin_anew(keeps=keeps)
        with p.pulse.phase(WorkerPhase.WAIT):
            self._enter(keeps=keeps)
        self._contact.open()

    def refill(self) -> None:
        """Ask the logbook for samples if the next step has too few.

        In a sea that nothing disturbs a merge has dealt them before.
        """
        p, hand = self._p, self._p.hand
        if hand is None or hand.is_over or hand.left >= hand.batch:
            return
        with p.pulse.phase(WorkerPhase.WAIT):
            said = p.together.settled(self._ask(upto=hand.taken + p.now.need))
        match said:
            case GoOn():
                hand.receive(said.dealt)
            case EnterAnew():
                p.keeper.fence()
                self.anew(keeps=said.keeps)

    # -- inside ----------------------------------------------------------------------------------

    def _look(self) -> Said:
        """Read the logbook. Raises ``SeaError`` if it is not the one that the state is from."""
        p = self._p
        if p.now.place and not p.logbook.view.length:
            p.logbook.resume(p.now.place)
        p.logbook.poll()
        said = returning(
            p.logbook,
            p.islands,
            lineage=p.now.lineage,
            run=p.channel.run,
            sign=lambda: p.mailbox.sign(p.islands.name),
        )
        return said, []

    def _entrance(self, *, keeps: bool) -> Entrance:
        p, batch = self._p, self._p.settings.batch
        return Entrance(
            p.logbook,
            p.mailbox,
            p.islands,
            parameters=p.tensors.parameters,
            first=p.tensors.digest_of_weights(),
            weight=p.islands.every * batch.microbatches * batch.size,
            run=p.channel.run,
            clock=time.monotonic,
            adopted=p.now.adopted if keeps else None,
            dealt=None if p.hand is None else p.hand.data,
            need=p.now.need,
        )

    def _enter(self, *, keeps: bool = False) -> None:
        """Get the sea's weights and join it; with ``keeps`` the state has them."""
        p, began_s, tensors, now = self._p, time.perf_counter(), self._p.tensors, self._p.now
        if not keeps:
            tensors.begin()
        now.need = self._need()
        entrance = self._entrance(keeps=keeps)
        now.states = tensors.digests(range(p.islands.portions))
        how, roots = "kept" if keeps else "built", list[str]()
        while not isinstance(said := p.together.told(entrance.next), GoOn):
            match said:
                case LoadWeights():
                    how, roots = "given", [*roots, said.root]
                    self._load(said)
                case AdoptMerge():
                    adopt(p, self._contact, said)
                case _:
                    p.together.pause()
        self._joined(said)
        for root in roots if p.world.rank == 0 else ():
            remove_given(root)
        p.emit(
            IslandJoined(
                island=p.islands.name,
                tide=now.adopted,
                lineage=now.lineage,
                how=how,
                seconds=time.perf_counter() - began_s,
            )
        )

    def _joined(self, said: GoOn) -> None:
        """Begin to train with the sea's weights, at the place where it joined."""
        p, now = self._p, self._p.now
        if said.tide > now.adopted:  # in pairs it takes part from now on, whatever it was given
            p.counters.skip_to(said.tide, step=p.step)
        now.lineage, now.entered, now.place = said.lineage, now.adopted, said.place
        now.departs = p.step + p.islands.stride
        if p.hand is not None:
            p.hand.begin(said.dealt)
        p.tensors.take_weights()

    def _load(self, said: LoadWeights) -> None:
        """Take the weights that another island gave."""
        tensors, now = self._p.tensors, self._p.now
        tensors.load(functools.partial(api.load, said.root))
        now.adopted, now.bases, now.named = said.tide, list(said.bases), list(said.bases)
        now.states = tensors.digests(range(self._p.islands.portions))

    def _need(self) -> int:
        """Return the samples that cover the steps to the next tide, its overlap, and one more."""
        hand, islands = self._p.hand, self._p.islands
        if hand is None:
            return 0
        _ = hand.data  # refuses a run without a loader
        return (islands.stride + islands.overlap + 1 + hand.ahead) * hand.batch

    def _ask(self, *, upto: int) -> Decide:
        """Return the decisions of rank 0 while it asks for samples."""
        errands, counters = self._contact.errands, self._p.counters
        if errands is None:
            return unasked
        return Asking(
            errands.courier,
            upto=upto,
            dealt=lambda: counters.now.dealt,
            await_news=errands.waiting(),
            check=errands.check,
        ).next
