"""The arrival of a tide, as rank 0 decides it: the only place where an island waits for others.

Between arrivals it may ask the logbook for samples, which waits for the store alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from holdfast.ckpt.errors import NotFoundError
from holdfast.elastic.errors import SeaError
from holdfast.elastic.islands.commands import (
    AwaitNews,
    Command,
    EnterAnew,
    GiveWeights,
    GoOn,
    SkipTides,
    adoption,
)
from holdfast.elastic.islands.courier import Courier
from holdfast.elastic.sea.settings import Islands

ROUND_S: Final = 0.25
_UNPROTECTED_S: Final = 10.0
"""After so long training waits for the tide and not for the protection of its step."""


class Arrival:
    """One arrival. It ends when the merge of the work under way is adopted.

    With ``wait="all"`` exactly one merge is adopted, so that a run that goes back adopts each at
    the step where it did before; otherwise all that are there, up to one whose dealt samples it has
    to train again. ``adopted()`` counts the merges that the island has adopted; ``nbytes(portion)``
    is the size of payloads; ``dealt()`` counts the samples that it has got, ``taken()`` those of
    them that it has trained.
    """

    def __init__(  # noqa: PLR0913 - made in one place, all by keyword
        self,
        courier: Courier,
        islands: Islands,
        *,
        adopted: Callable[[], int],
        weight: int,
        nbytes: Callable[[int], int],
        await_news: Callable[[float], None],
        check: Callable[[], None],
        clock: Callable[[], float],
        dealt: Callable[[], int] = lambda: 0,
        taken: Callable[[], int] = lambda: 0,
        hurries: bool = False,
    ) -> None:
        self._courier, self._islands = courier, islands
        self._adopted, self._weight, self._nbytes = adopted, weight, nbytes
        self._await_news, self._check, self._clock = await_news, check, clock
        self._dealt, self._taken = dealt, taken
        self._first, self._began_s = adopted(), clock()
        if hurries:
            courier.hurry()

    def next(self) -> tuple[Command, list[bytes]]:
        """Return what all ranks do next, and the payloads of an `AdoptMerge`.

        Raises ``SeaError`` if the sea does not accept this island any more.
        """
        self._check()
        self._refuse()
        tide, logbook = self._adopted(), self._courier.logbook
        later = self._skips_to(tide)
        has_adopted = tide > self._first
        if self._islands.is_dealt and self._courier.is_put_out:
            return EnterAnew(keeps=True), []  # others have its samples
        if self._islands.is_dealt and self._is_ahead(tide):
            return self._on(tide), []
        if tide in logbook.merged and not (has_adopted and self._takes_one):
            if (said := self._adoption(tide)) is None:
                self._await_news(ROUND_S)
                return AwaitNews(), []
            return said
        if later is not None and not has_adopted:
            return SkipTides(tide=later), []
        if not self._courier.is_member and (logbook.left != "done" or not has_adopted):
            if self._islands.is_dealt:
                return EnterAnew(keeps=True), []
            self._courier.rejoin(tide=tide, weight=self._weight)
        if has_adopted:
            return self._on(tide), []
        if (request := self._courier.request()) is not None:
            root = self._courier.mailbox.given_root(request, by=self._islands.name)
            return GiveWeights(request=request, root=root), []
        if self._clock() - self._began_s > _UNPROTECTED_S:
            self._courier.hurry()
        self._courier.awaited()
        self._await_news(ROUND_S)
        return AwaitNews(), []

    def _on(self, tide: int) -> GoOn:
        logbook = self._courier.logbook
        more = logbook.dealt_since(self._dealt())
        return GoOn(place=logbook.place(tide), stride=logbook.stride(tide), dealt=more)

    def _is_ahead(self, tide: int) -> bool:
        """True if the sea has samples from this island that it has gone back before.

        It trains them again before it adopts that merge: its next work must not have fewer.
        """
        lineage, own = self._courier.logbook.mine.get(tide, (-1, None))
        return own is not None and lineage == self._courier.lineage and own.trained > self._taken()

    @property
    def _takes_one(self) -> bool:
        """True unless this island must catch up with the others."""
        is_behind = not self._courier.is_member and self._courier.logbook.left != "done"
        return self._islands.wait == "all" and not is_behind

    def _skips_to(self, tide: int) -> int | None:
        """Return the next tide of an island that came back later, where islands meet in pairs.

        To be called before `SeaLogbook.merged` is read: that has every meeting of a view, or more.
        """
        logbook, courier = self._courier.logbook, self._courier
        member = logbook.view.members.get(self._islands.name)
        if not logbook.view.is_paired or member is None or member.lineage != courier.lineage:
            return None
        if member.tide <= tide or tide in logbook.merged:
            return None
        return min((each for each in list(logbook.merged) if each > tide), default=member.tide)

    def _refuse(self) -> None:
        name, meet = self._islands.name, self._islands.meet
        if self._courier.is_replaced:
            raise SeaError(
                f"another run has joined the sea at {meet} as {name}: give each island a name of "
                "its own; this one may begin again under another name and in another checkpoint "
                "directory"
            )
        if self._courier.logbook.left == "astray" and not self._courier.is_member:
            raise SeaError(
                f"the weights of the island {name} are not those of the sea at {meet}: its memory "
                "or its disk is at fault, or it runs another version; start it with another "
                "checkpoint directory, then it enters with the sea's weights"
            )

    def _adoption(self, tide: int) -> tuple[Command, list[bytes]] | None:
        """Return the adoption of a merge with its payloads, None while some are under way."""
        courier, logbook = self._courier, self._courier.logbook
        record = logbook.merged[tide]
        lineage, own = logbook.mine.get(tide, (-1, None))
        digest = own.digest if own is not None and lineage == courier.lineage else ""
        try:
            data = courier.payloads(record)
        except NotFoundError:
            return EnterAnew(), []
        if data is None:
            return None
        for part, one in zip(record.parts, data, strict=True):
            self._check_size(part.island, len(one), record.portion)
        return adoption(record, own=digest), data

    def _check_size(self, island: str, nbytes: int, portion: int) -> None:
        if nbytes != self._nbytes(portion):
            raise SeaError(
                f"the payload of {island} for portion {portion} has {nbytes} bytes, needed: "
                f"{self._nbytes(portion)}; look for another version on that island"
            )


class Asking:
    """One question for more samples, ``upto`` a number in the lineage.

    It ends when there are more, or the logbook has none left. ``dealt()`` counts those that the
    island has got.
    """

    def __init__(
        self,
        courier: Courier,
        *,
        upto: int,
        dealt: Callable[[], int],
        await_news: Callable[[float], None],
        check: Callable[[], None],
    ) -> None:
        self._courier, self._dealt = courier, dealt
        self._await_news, self._check = await_news, check
        courier.want(upto)

    def next(self) -> tuple[Command, list[bytes]]:
        """Return what all ranks do next, and no payloads."""
        self._check()
        self._await_news(ROUND_S)
        if self._courier.is_put_out:
            return EnterAnew(keeps=True), []
        if self._courier.is_wanting:
            return AwaitNews(), []
        return GoOn(dealt=self._courier.logbook.dealt_since(self._dealt())), []
