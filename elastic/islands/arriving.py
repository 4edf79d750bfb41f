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
    adoption,
)
from holdfast.elastic.islands.courier import Courier
from holdfast.elastic.sea.settings import Islands

_ROUND_S: Final = 0.25
_UNPROTECTED_S: Final = 10.0
"""After so long training waits for the tide and not for the protection of its step."""


class Arrival:
    """One arrival. It ends when the merge of the work under way is adopted.

    With ``wait="all"`` exactly one merge is adopted, so that a run that goes back adopts each at
    the step where it did before; otherwise all that are there. ``adopted()`` counts the merges that
    the island has adopted; ``nbytes(portion)`` is the size of payloads; ``dealt()`` counts the
    samples that it has got.
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
        hurries: bool = False,
    ) -> None:
        self._courier, self._islands = courier, islands
        self._adopted, self._weight, self._nbytes = adopted, weight, nbytes
        self._await_news, self._check, self._clock = await_news, check, clock
        self._dealt = dealt
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
        has_adopted = tide > self._first
        if self._islands.is_dealt and self._courier.is_put_out:
            return EnterAnew(keeps=True), []  # others have its samples
        if tide in logbook.merged and not (has_adopted and self._takes_one):
            if (said := self._adoption(tide)) is None:
                self._await_news(_ROUND_S)
                return AwaitNews(), []
            return said
        if not self._courier.is_member and (logbook.left != "done" or not has_adopted):
            if self._islands.is_dealt:
                return EnterAnew(keeps=True), []
            self._courier.rejoin(tide=tide, weight=self._weight)
        if has_adopted:
            more = logbook.dealt_since(self._dealt())
            stride = logbook.stride(tide)
            return GoOn(place=logbook.place(tide), stride=stride, dealt=more), []
        if (request := self._courier.request()) is not None:
            root = self._courier.mailbox.given_root(request, by=self._islands.name)
            return GiveWeights(request=request, root=root), []
        if self._clock() - self._began_s > _UNPROTECTED_S:
            self._courier.hurry()
        self._courier.awaited()
        self._await_news(_ROUND_S)
        return AwaitNews(), []

    @property
    def _takes_one(self) -> bool:
        """True unless this island must catch up with the others."""
        is_behind = not self._courier.is_member and self._courier.logbook.left != "done"
        return self._islands.wait == "all" and not is_behind

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
            if len(one) != self._nbytes(record.portion):
                raise SeaError(
                    f"the payload of {part.island} in tide {tide} has {len(one)} bytes, needed: "
                    f"{self._nbytes(record.portion)}; look for another version on that island"
                )
        return adoption(record, own=digest), data


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
        self._await_news(_ROUND_S)
        if self._courier.is_put_out:
            return EnterAnew(keeps=True), []
        if self._courier.is_wanting:
            return AwaitNews(), []
        return GoOn(dealt=self._courier.logbook.dealt_since(self._dealt())), []
