"""An island's tides on all ranks: works depart, and their merges arrive some steps later."""

from __future__ import annotations

import logging
import time

from holdfast.ckpt import api
from holdfast.ckpt.errors import StoreError
from holdfast.elastic.channel.base import WorkerPhase
from holdfast.elastic.events import WeightsGiven
from holdfast.elastic.islands.arriving import Arrival
from holdfast.elastic.islands.commands import (
    AdoptMerge,
    AwaitNews,
    EnterAnew,
    GiveWeights,
    GoOn,
    SkipTides,
)
from holdfast.elastic.islands.counters import Sent
from holdfast.elastic.islands.courier import Outgoing
from holdfast.elastic.islands.giving import Giving
from holdfast.elastic.islands.life.adopting import adopt
from holdfast.elastic.islands.life.contact import Contact
from holdfast.elastic.islands.life.entry import SeaEntry
from holdfast.elastic.islands.life.parts import IslandParts
from holdfast.elastic.islands.mailbox import digest_of
from holdfast.elastic.islands.messages import Given
from holdfast.elastic.islands.together import Decide, unasked

_log = logging.getLogger(__name__)


class Tides:
    """One generation's tides; all methods are collective."""

    def __init__(self, parts: IslandParts, contact: Contact, entry: SeaEntry) -> None:
        self._p, self._contact, self._entry = parts, contact, entry
        self.giving = Giving(parts.mailbox, name=parts.islands.name)

    @property
    def is_due(self) -> bool:
        """True if the merge of the work under way belongs to the end of this step."""
        sents = self._p.now.sents
        return bool(sents) and self._p.step >= sents[0].step + self._p.islands.overlap

    # -- works -----------------------------------------------------------------------------------

    def depart(self, *, last: bool = False) -> None:
        """Take the progress of the portions that are due as works of the next tides.

        ``last``: of all portions, for the last merge. Raises ``NotFiniteError``.
        """
        p = self._p
        p.keeper.fence()
        step_us = self._step_us()
        for portion in range(p.islands.portions) if last else p.counters.due():
            payload = p.tensors.encode(portion)
            sent = p.counters.note_departed(
                portion,
                step=p.step,
                digest=digest_of(payload),
                nbytes=len(payload),
                step_us=step_us,
            )
            self._contact.hold([self._outgoing(sent, payload, last=last)])

    def hold_restored(self) -> None:
        """Hold the works that were under way in the state that was restored."""
        self._contact.hold(
            self._outgoing(sent, self._p.tensors.payload_of(sent.portion).numpy().tobytes())
            for sent in self._p.now.sents
        )

    def _step_us(self) -> int:
        """Return the microseconds of a step of late, as rank 0 measured them."""
        if self._p.islands.least_every is None:
            return 0
        (first, *_) = self._p.world.gather(self._contact.pace.take_us())
        return int(first)

    def _outgoing(self, sent: Sent, payload: bytes, *, last: bool = False) -> Outgoing:
        work = self._p.counters.work_of(sent, last=last)
        return Outgoing(work=work, payload=payload, step=sent.step)

    # -- merges ----------------------------------------------------------------------------------

    def arrive(self, *, hurries: bool = False, may_put_off: bool = False) -> bool:
        """Adopt the merge of the work under way, with a quorum every later one too.

        Return False if it ``may_put_off``, the merge is not there, and a rank wishes that the step
        ends: then the next generation begins with this.
        """
        p, contact = self._p, self._contact
        p.keeper.fence()
        began_s, first = time.perf_counter(), p.now.adopted
        contact.waits_since_s = time.monotonic()
        arrival = self.arrival(Arrival, hurries=hurries)
        with p.pulse.phase(WorkerPhase.WAIT):
            while not isinstance(said := p.together.told(arrival), GoOn):
                match said:
                    case AdoptMerge():
                        adopt(p, contact, said, waited_s=time.perf_counter() - began_s)
                        began_s = time.perf_counter()
                    case GiveWeights():
                        self._give(said)
                    case EnterAnew():
                        self._entry.anew(keeps=said.keeps)
                        first = p.now.adopted
                        break
                    case SkipTides():
                        self.skip(said)
                        break
                    case AwaitNews() if may_put_off and p.together.wished:
                        contact.waits_since_s = None
                        return False
        contact.waits_since_s = None
        going_on = said if isinstance(said, GoOn) else None
        self._note_arrived(going_on, adopted=p.now.adopted - first)
        return True

    def _note_arrived(self, said: GoOn | None, *, adopted: int) -> None:
        p = self._p
        if p.hand is not None and said is not None:
            p.hand.receive(said.dealt)
        several = p.islands.wait != "all"
        p.counters.note_arrived(
            adopted if several else 1,
            place="" if said is None else said.place,
            stride=0 if said is None else said.stride,
        )

    def arrival(self, kind: type[Arrival], *, hurries: bool = False) -> Decide:
        """Return the decisions of an arrival, which rank 0 makes."""
        p, errands, counters = self._p, self._contact.errands, self._p.counters
        if errands is None:
            return unasked
        return kind(
            errands.courier,
            p.islands,
            adopted=lambda: counters.now.adopted,
            weight=counters.weight(counters.now.adopted % p.islands.portions),
            await_news=errands.waiting(),
            check=errands.check,
            clock=time.monotonic,
            nbytes=p.tensors.nbytes,
            dealt=lambda: counters.now.dealt,
            taken=lambda: counters.now.taken,
            hurries=hurries,
        ).next

    def skip(self, said: SkipTides) -> None:
        """Go on at a later tide; own work that is not merged stays."""
        self._p.counters.skip_to(said.tide, step=self._p.step)
        self._contact.adopted(said.tide - 1)

    def _give(self, said: GiveWeights) -> None:
        """Save the sea's weights for an island that asked for them."""
        p, began_s, now = self._p, time.perf_counter(), self._p.now
        state = {"weights": p.tensors.weights, "momentum": p.tensors.momentum}
        given = Given(by=p.islands.name, tide=now.adopted, bases=tuple(now.bases))
        try:
            api.save(said.root, state, step=now.adopted)
            if p.world.rank == 0:
                self.giving.answer(said.request, given, root=said.root)
        except (StoreError, OSError) as error:
            _log.warning("the weights cannot be given now; trying again: %s", error)
            p.together.pause()
            return
        seconds = time.perf_counter() - began_s
        p.emit(WeightsGiven(island=said.request.island, tide=now.adopted, seconds=seconds))
