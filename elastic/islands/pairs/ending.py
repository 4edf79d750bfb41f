"""The end of an island that met others in pairs, as rank 0 decides it.

The island adopts what is left of its meetings, sends its works of all portions, and leaves with
them. Once all islands have, the last merge is a function of the records: that of all their works.
"""

from __future__ import annotations

from holdfast.elastic.islands.arriving import ROUND_S, Arrival
from holdfast.elastic.islands.commands import (
    AwaitNews,
    Command,
    GoOn,
    MergeLast,
    SendLast,
    SkipTides,
)


class PairEnding(Arrival):
    """One end. It is over when the last merge of every portion is adopted.

    The arguments are those of `Arrival`. An island that went back finds its works in the records:
    they count, and not the ones that it would send now.
    """

    _sent: int | None = None
    _merged = 0

    def next(self) -> tuple[Command, list[bytes]]:
        """Return what all ranks do next, and the payloads of a merge.

        Raises ``SeaError`` if the sea does not accept this island any more.
        """
        self._check()
        self._refuse()
        tide, courier, view = self._adopted(), self._courier, self._courier.logbook.view
        later = self._skips_to(tide)
        if tide in courier.logbook.merged:
            return self._adoption(tide) or self._waited()
        if later is not None:
            return SkipTides(tide=later), []
        if courier.has_ended and view.is_over:
            return self._last()
        if courier.is_member and self._sent != tide:
            self._sent = tide
            return SendLast(), []
        if courier.is_member:
            courier.hurry()
            courier.end()
        elif not courier.has_ended:
            courier.rejoin(tide=tide, weight=self._weight)
        return self._waited()

    def _waited(self) -> tuple[Command, list[bytes]]:
        self._await_news(ROUND_S)
        return AwaitNews(), []

    def _last(self) -> tuple[Command, list[bytes]]:
        view, portion = self._courier.logbook.view, self._merged
        if portion == self._islands.portions:
            return GoOn(), []
        parts = [view.former[island].last[portion] for island in sorted(view.ended)]
        data = self._courier.last_payloads(parts)
        if data is None:
            return self._waited()
        for part, one in zip(parts, data, strict=True):
            self._check_size(part.island, len(one), portion)
        self._merged += 1
        return MergeLast(portion=portion, weights=tuple(part.weight for part in parts)), data
