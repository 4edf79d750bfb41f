"""An island's contact with the sea: the courier of rank 0, its signs, and the works it sends."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from holdfast.ckpt.errors import CkptError, StoreError
from holdfast.elastic.events import TidePublished
from holdfast.elastic.groups.reform import host_of
from holdfast.elastic.islands.courier import Courier, Outgoing
from holdfast.elastic.islands.errands import Errands
from holdfast.elastic.islands.giving import remove_given
from holdfast.elastic.islands.haul.direct import Direct, sea_key
from holdfast.elastic.islands.haul.freight import Freight, Haul, on_thread
from holdfast.elastic.islands.held import HeldWorks
from holdfast.elastic.islands.life.parts import IslandParts
from holdfast.elastic.islands.mailbox import digest_of
from holdfast.elastic.islands.messages import Sign
from holdfast.elastic.islands.pace import OwnPace
from holdfast.elastic.sea.records import Work

_PROTECTED_WAIT_S: Final = 0.02


class Contact:
    """One generation's contact.

    ``errands`` and ``courier`` are there at rank 0 alone, while the contact is open; the courier
    stays when its errands have ended. ``waits_since_s`` is when training began to wait for others.
    """

    def __init__(self, parts: IslandParts) -> None:
        self._p = parts
        key = parts.islands.key
        self._sea_key = sea_key(key, run=parts.channel.key) if key else None
        self._direct: Direct | None = None
        self._held = HeldWorks(steps=parts.settings.held_steps)
        self.pace = OwnPace(time.perf_counter)
        self.courier: Courier | None = None
        self.errands: Errands | None = None
        self.waits_since_s: float | None = None

    def open(self) -> None:
        """Start the courier at rank 0, and serve its payloads to the other islands."""
        p = self._p
        if p.world.rank:
            return
        if self._sea_key is not None and self._direct is None:
            self._direct = Direct(
                self._sea_key,
                host=host_of(p.channel.sidecar),
                place=p.islands.place,
                lines=p.mailbox.lines,
                digest_of=digest_of,
                patience_s=p.islands.patience_s,
            )
        self.courier = Courier(
            p.logbook,
            p.mailbox,
            p.islands,
            lineage=p.now.lineage,
            adopted=p.now.adopted,
            clock=time.monotonic,
            protected=self._is_protected,
            sign=self._sign,
            told=self._tell_published,
            remove=remove_given,
            freight=Freight(p.mailbox, lines=p.mailbox.lines, peers=self._direct, submit=on_thread),
        )
        if self._direct is not None:
            self._direct.address_of = self.courier.address
        self.errands = Errands(self.courier, patience_s=p.islands.patience_s)

    # -- works -----------------------------------------------------------------------------------

    def hold(self, works: Iterable[Outgoing]) -> None:
        """Take works, which `release` sends."""
        self._held.put(works)

    def release(self, *, all_: bool = False) -> None:
        """Give the courier the works that no loss guard undoes any more.

        ``all_``: no step follows in which one could.
        """
        if all_:
            self._held.end()
        due = self._held.due(self._p.step)
        if due and self.errands is not None:
            self.errands.courier.send(due)
            self.errands.call()

    def adopted(self, tide: int) -> Haul:
        """Tell the courier of a merge that is adopted, or skipped; return what was moved for it."""
        return Haul() if self.errands is None else self.errands.courier.adopted(tide)

    # -- the end ---------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Stop the courier, and drop the works that were held: the island enters anew."""
        self.end()
        self._held.clear()

    def end(self) -> None:
        """Stop the courier, so that nobody else uses the logbook from now on."""
        islands = self._p.islands
        if self.errands is not None and not self.errands.end(islands.patience_s):
            raise StoreError(
                f"{islands.meet}: a call has not come back for {islands.patience_s:g} s; check the "
                "store, then start again"
            )
        self.errands = None

    def close(self) -> None:
        """Stop the courier, and serve no other island any more."""
        errands, self.errands = self.errands, None
        if errands is not None:
            errands.close()
        if self._direct is not None:
            self._direct.close()
            self._direct = None

    # -- called by the courier, on its thread ----------------------------------------------------

    def _is_protected(self, step: int) -> bool:
        p = self._p
        try:
            reached = p.keeper.client.protected_step(
                generation=p.world.generation, at_least=step, timeout_s=_PROTECTED_WAIT_S
            )
        except CkptError:
            return False  # the generation ends, or the sidecar is busy
        return reached >= step

    def _sign(self, number: int) -> Sign:
        p, since_s = self._p, self.waits_since_s
        return Sign(
            island=p.islands.name,
            run=p.channel.run,
            number=number,
            needs=self._needs(),
            step=p.step,
            tide=p.now.adopted,
            waiting_s=0.0 if since_s is None else time.monotonic() - since_s,
            sent_bytes=p.mailbox.sent,
            fetched_bytes=p.mailbox.fetched,
            step_s=self.pace.recent_s,
            line=p.mailbox.lines.figures,
            address="" if self._direct is None else self._direct.address,
        )

    def _needs(self) -> int:
        """Return the oldest tide that a state to which this island may go back has not adopted."""
        keeper, held = self._p.keeper, self._p.settings.held_steps
        if self._p.settings.checkpoint is None:
            step = keeper.protection().step
        else:
            try:
                step = keeper.client.durable_step()
            except CkptError:
                step = -1
        return self._p.counters.adopted_at(step - held)

    def _tell_published(self, work: Work, seconds: float) -> None:
        self._p.channel.emit(
            TidePublished(
                tide=work.tide,
                portion=work.portion,
                weight=work.weight,
                bytes=work.nbytes,
                sent_bytes=self._p.mailbox.sent,
                seconds=seconds,
            )
        )
