"""The courier of an island: publishes its works, follows the logbook, decides, fetches payloads.

One round is `Courier.turn`; it neither sleeps nor starts threads, so that a simulation can drive
it. `holdfast.elastic.islands.errands` runs it on a thread beside the training of rank 0.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from holdfast.elastic.errors import SeaError
from holdfast.elastic.islands.haul.freight import Freight, Haul
from holdfast.elastic.islands.logbook import SeaLogbook
from holdfast.elastic.islands.mailbox import Mailbox
from holdfast.elastic.islands.messages import Asked, Sign
from holdfast.elastic.islands.requests import OpenRequests
from holdfast.elastic.sea.decide import Since, decide
from holdfast.elastic.sea.portions import last_of
from holdfast.elastic.sea.records import Dealt, Entered, Left, Merged, Part, Work
from holdfast.elastic.sea.settings import Islands

_log = logging.getLogger(__name__)

_LONGEST_BEAT_S: Final = 2.0
_BEATS_OF_PATIENCE: Final = 8
_AHEAD_S: Final = 0.02
"""The time between two looks for works that training does not wait for yet, for each island."""

_Key: TypeAlias = tuple[str, int, int, int]
"""Island, lineage, tide and portion of a work."""


def beat_s(islands: Islands) -> float:
    """Return the seconds between two signs of life."""
    return min(_LONGEST_BEAT_S, islands.patience_s / _BEATS_OF_PATIENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A work that is published once ``step`` is protected, with its payload."""

    work: Work
    payload: bytes
    step: int


class Courier:
    """One island's part in the sea, without its tensors.

    ``protected(step)`` says whether a step is protected; ``sign(number)`` returns the sign of life
    of that number. ``adopted`` are the merges that the island has: the payloads of the next one are
    fetched ahead, if it is recorded. ``told`` gets each work that was published, with the seconds,
    ``remove`` the root of weights that nobody waits for any more. ``freight`` moves the payloads;
    without one, a round waits for each.
    """

    def __init__(  # noqa: PLR0913 - made in one place, all by keyword
        self,
        logbook: SeaLogbook,
        mailbox: Mailbox,
        islands: Islands,
        *,
        lineage: int,
        adopted: int = 0,
        clock: Callable[[], float],
        protected: Callable[[int], bool],
        sign: Callable[[int], Sign],
        told: Callable[[Work, float], None] = lambda *_: None,
        remove: Callable[[str], None] = lambda _: None,
        freight: Freight | None = None,
    ) -> None:
        self.logbook, self.mailbox, self._islands = logbook, mailbox, islands
        self._me, self.lineage, self._needs = islands.name, lineage, 0
        self._clock, self._protected, self._sign, self._told = clock, protected, sign, told
        self._lock = threading.Lock()
        self._outgoing: deque[Outgoing] = deque()
        self._is_overdue = False
        self._wish: Entered | None = None
        self._wanted = 0
        self._ends = False
        self._last: tuple[Part, ...] = ()
        self._works: dict[_Key, Work] = {}
        self._heard: dict[str, float] = {}
        self._joined: dict[str, int] = {}
        self._arrived: dict[_Key, float] = {}
        self._signs: dict[str, Sign] = {}
        self.freight = Freight(mailbox) if freight is None else freight
        self._requests = OpenRequests(
            mailbox,
            me=islands.name,
            beat_s=beat_s(islands),
            patience_s=islands.patience_s,
            remove=remove,
        )
        self._look_s = self._looked_s = self._ahead_s = -float("inf")
        self._is_awaited = False
        self._foreign: Sign | None = None
        self._beat, self._next = 0, adopted

    # -- called by the training ------------------------------------------------------------------

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Publish works as soon as their step is protected."""
        with self._lock:
            self._is_overdue = False
            self._outgoing.extend(outgoing)

    def awaited(self) -> None:
        """Look for the works of others at every turn: training waits for them."""
        self._is_awaited = True

    def hurry(self) -> None:
        """Publish what is under way even if its step is not protected yet: training waits for it.

        It is right without protection too: an island that goes back adopts the work that the
        record names.
        """
        with self._lock:
            self._is_overdue = True

    def rejoin(self, *, tide: int, weight: int) -> None:
        """Enter the sea again with the work that this island has, after ``tide`` merges."""
        with self._lock:
            self._wish = Entered(
                number=0, island=self._me, tide=tide, weight=weight, lineage=self.lineage
            )

    def want(self, upto: int) -> None:
        """Ask for samples, up to so many of this lineage; the next turn does, if there are any."""
        self._wanted = upto

    def end(self) -> None:
        """Leave the sea with the works of all portions for its last merge, once all are sent."""
        with self._lock:
            self._ends = True

    def last_payloads(self, parts: Sequence[Part]) -> list[bytes] | None:
        """Return the payloads of a portion's last merge, None while some are under way.

        Raises ``NotFoundError`` if one was removed.
        """
        self._last = tuple(parts)
        return self.freight.take(parts)

    @property
    def is_wanting(self) -> bool:
        """True until a turn has read whether there are more samples."""
        return self._wanted > 0

    def payloads(self, record: Merged) -> list[bytes] | None:
        """Return the payloads of a merge, which were fetched before as a rule.

        None while some are under way. Raises ``NotFoundError`` if one was removed.
        """
        self._next = max(self._next, record.tide)
        return self.freight.take(record.parts)

    def adopted(self, tide: int) -> Haul:
        """Release the payloads of a merge that is adopted, or skipped; return what was moved."""
        self._next, self._is_awaited = max(self._next, tide + 1), False
        record, moved = self.logbook.merged.get(tide), Haul()
        if record is not None:
            moved = self.freight.haul(record.parts)
            self.freight.release(part.digest for part in record.parts)
        self.logbook.forget_before(tide)
        return moved

    def address(self, island: str) -> str:
        """Return where an island gives its payloads, "" if it does not, or gave no sign yet."""
        sign = self._signs.get(island)
        return "" if sign is None else sign.address

    def request(self) -> Asked | None:
        """Return a request for the sea's weights that it is this island's turn to answer."""
        return self._requests.mine(self.logbook.view.members, self._clock())

    @property
    def is_member(self) -> bool:
        """True if this island takes part, by the records that were read."""
        member = self.logbook.view.members.get(self._me)
        return member is not None and member.lineage == self.lineage

    @property
    def is_put_out(self) -> bool:
        """True if others have put this island out, or another state of it."""
        return not self.is_member and self.logbook.left not in (None, "done", "astray")

    @property
    def has_ended(self) -> bool:
        """True if this island's works are in the last merge of islands that meet in pairs."""
        former = self.logbook.view.former.get(self._me)
        return former is not None and former.lineage == self.lineage and bool(former.last)

    @property
    def is_replaced(self) -> bool:
        """True if another run took the island's name."""
        view = self.logbook.view
        found = view.members.get(self._me) or view.former.get(self._me)
        return found is not None and found.lineage > self.lineage

    # -- one round -------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Do what there is to do now; return whether anything has changed.

        Raises the errors of the store and of the logbook.
        """
        now = self._clock()
        changed = self._publish()
        changed |= self.logbook.poll()
        changed |= self._ask_for_samples()
        view = self.logbook.view
        self._greet(now)
        looks = now >= self._look_s
        if looks:
            self._look(now)
        if not self.is_member:
            if self._enter_again():
                return True
            if not self.has_ended:
                return changed
        elif self._end():
            return True
        if looks or self._is_awaited or self._is_ready(now):
            changed |= self._read_works(now)
        since = Since(heard=self._heard, arrived=self._arrivals())
        works = self._works.values()
        record = decide(view, works, now=now, since=since, islands=self._islands, me=self._me)
        if record is not None:
            if isinstance(record, Left):
                _log.warning("island %s leaves the sea: %s", record.island, record.why)
            self.logbook.append(record)
            changed = True
        self._fetch_ahead()
        return changed

    def leave(self) -> bool:
        """Write that this island's run is over; return whether it took part until now."""
        self.logbook.poll()
        found = self.is_member
        while self.is_member:  # each round reads at least one record more
            number = self.logbook.view.length
            self.logbook.append(Left(number=number, island=self._me, why="done"))
        return found

    def _publish(self) -> bool:
        with self._lock:
            due = self._outgoing[0] if self._outgoing else None
            overdue = self._is_overdue
        if due is None:
            return False
        if not (self.freight.is_sending or overdue or self._protected(due.step)):
            return False
        if (published := self.freight.publish(due.work, due.payload)) is None:
            return False
        known, seconds = published
        self._note(known)
        if known.digest == due.work.digest:
            self.freight.put(known.digest, due.payload)
        self._told(known, seconds)
        with self._lock:
            self._outgoing.popleft()
        self._tidy()
        return True

    def _ask_for_samples(self) -> bool:
        """Have the samples dealt that training wants, unless there are none."""
        view, wanted = self.logbook.view, self._wanted
        if not wanted:
            return False
        member = view.members[self._me] if self.is_member else None
        is_empty = view.supply is None or view.supply.left == 0
        if member is None or member.dealt >= wanted or is_empty:
            self._wanted = 0
            return False
        self.logbook.append(Dealt(number=view.length, island=self._me, upto=wanted))
        return True

    def _enter_again(self) -> bool:
        with self._lock:
            wish, self._wish = self._wish, None
        view = self.logbook.view
        if wish is None or self._me in view.members:
            return False
        tide = view.tide if view.is_paired else wish.tide
        self.logbook.append(msgspec.structs.replace(wish, number=view.length, tide=tide))
        return True

    def _end(self) -> bool:
        """Write that the run is over, with its works for the last merge, once they are sent."""
        view, mine = self.logbook.view, self.logbook.view.members[self._me]
        with self._lock:
            due = self._ends and not self._outgoing
        portions = self._islands.portions
        names = [last_of(portion, portions=portions) for portion in range(portions)]
        works = [self._works.get((self._me, self.lineage, mine.tide, each)) for each in names]
        last = tuple(work.part for work in works if work is not None)
        if not due or len(last) < portions:
            return False
        self.logbook.append(Left(number=view.length, island=self._me, why="done", last=last))
        return True

    def _greet(self, now: float) -> None:
        """Count the silence of islands from when their `Entered` was read, not from before."""
        members = self.logbook.view.members
        joined = {island: member.joined for island, member in members.items()}
        old = {island for island in self._heard if self._joined.get(island) == joined.get(island)}
        self._heard = {island: self._heard[island] if island in old else now for island in joined}
        self._joined = joined

    def _look(self, now: float) -> None:
        """Give a sign of life, and read those of the others and their requests.

        Time in which this island could not look is nobody's silence.
        """
        self._beat += 1
        own = self._sign(self._beat)
        self._needs = own.needs
        if self._beat > 1:
            self._refuse_double(own, self.mailbox.sign(self._me))
        self.mailbox.show(self._me, own)
        for island in self.logbook.view.members:
            if island == self._me or (sign := self.mailbox.sign(island)) is None:
                continue
            if sign != self._signs.get(island):
                self._signs[island], self._heard[island] = sign, self._clock()
        missed_s = now - self._looked_s - 2 * beat_s(self._islands)
        if 0 < missed_s < float("inf"):
            self._heard = {each: min(at + missed_s, now) for each, at in self._heard.items()}
        stirred = self._requests.look(now, missed_s=max(0.0, missed_s))
        self._heard.update(dict.fromkeys(stirred & self._heard.keys(), now))
        if self.is_member:
            self._requests.tidy(self.logbook.view.members, now)
        self._looked_s, self._look_s = now, now + beat_s(self._islands)

    def _refuse_double(self, own: Sign, shown: Sign | None) -> None:
        """Raise ``SeaError`` if an older run shows itself as this island, again and again.

        A single sign may be a late one of a process that was killed.
        """
        if shown is None or shown.run == own.run or shown.number < own.number:
            return
        before, self._foreign = self._foreign, shown
        if before is not None and before.run == shown.run and before.number < shown.number:
            raise SeaError(
                f"another run is the island {self._me} of {self._islands.meet} at the same time: "
                "stop one of the two, or give each island a name and checkpoints of its own"
            )

    def _is_ready(self, now: float) -> bool:
        """Return whether this island's work for the next merge is out, so that others may follow.

        Then the merge is written and its payloads come while training goes on.
        """
        view = self.logbook.view
        own = (work for work in self._works.values() if work.island == self._me)
        return now >= self._ahead_s and any(view.fits(work) for work in own)

    def _read_works(self, now: float) -> bool:
        view, found = self.logbook.view, False
        oldest = view.oldest - self._kept_tides
        here = {work.island for work in self._works.values() if view.fits(work)}
        missing = [island for island in view.awaited(self._me) if island not in here]
        self._ahead_s = now + _AHEAD_S * len(missing)
        for island in missing:
            member = view.members[island]
            for lineage, tide, portion in self.mailbox.works_of(island):
                key = island, lineage, tide, portion
                if key in self._works or lineage != member.lineage or tide < oldest:
                    continue
                work = self.mailbox.work(*key)
                if work is not None:
                    self._note(work)
                    self._heard[island] = self._clock()
                    found = True
        self._works = {k: w for k, w in self._works.items() if k[2] >= oldest}
        self._arrived = {k: at for k, at in self._arrived.items() if k in self._works}
        return found

    def _note(self, work: Work) -> None:
        key = work.island, work.lineage, work.tide, work.portion
        self._works[key] = work
        self._arrived.setdefault(key, self._clock())

    def _arrivals(self) -> dict[str, float]:
        """Return when the newest work for the next merge arrived, by island."""
        view = self.logbook.view
        fitting = sorted((w.tide, key) for key, w in self._works.items() if view.fits(w))
        return {key[0]: self._arrived[key] for _, key in fitting}

    @property
    def _kept_tides(self) -> int:
        """The tides back to which works may still be merged."""
        return self._islands.portions * (self._islands.age_limit + 1)

    def _fetch_ahead(self) -> None:
        """Fetch the payloads of works that the next merge may name."""
        view = self.logbook.view
        sizes = {work.digest: work.nbytes for work in self._works.values()}
        awaited = view.awaited(self._me)
        merged = self.logbook.merged.get(self._next)
        named = (*self._last, *(merged.parts if merged else ()))
        works = (w for w in self._works.values() if view.fits(w) and w.island in awaited)
        wanted = [*named, *(work.part for work in works)]
        self.freight.check(named={part.digest for part in named})
        self.freight.keep({part.digest for part in wanted})
        others = (part for part in wanted if part.island != self._me)  # the own one is sent soon
        self.freight.fetch((part, sizes.get(part.digest, -1)) for part in others)

    def _tidy(self) -> None:
        """Remove own works that no island needs any more."""
        view = self.logbook.view
        signs = [self._signs.get(island) for island in view.members if island != self._me]
        if any(sign is None for sign in signs):
            return  # one that gave no sign yet may need any of them
        needs = min([self._needs, *(sign.needs for sign in signs if sign is not None)])
        self.mailbox.forget_before(self._me, min(needs, view.oldest) - self._kept_tides)
