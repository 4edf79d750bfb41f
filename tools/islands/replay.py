"""The merges of a sea's logbook, made once more from the payloads that are still there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.elastic.sea.records import Founded, Merged, Part, Record

Outcome: TypeAlias = Literal[
    "verified", "repeated", "differs", "damaged", "no payload", "no weights", "earlier"
]
"""The outcomes of a merge, by its result: works that came after it state its digest (``verified``);
nobody states one (``repeated``); they state another (``differs``). Or it could not be repeated: a
payload is not the one of its name (``damaged``) or was removed (``no payload``), the weights before
it are unknown (``no weights``), or those that the replay began with have it (``earlier``)."""


class Replayed(msgspec.Struct, kw_only=True):
    """A merge of the logbook and the outcome of its replay."""

    tide: int
    portion: int
    islands: tuple[str, ...]
    outcome: Outcome
    why: str = ""


class Sea(Protocol):
    """The weights and momentum of a sea that is replayed."""

    def digest(self, portion: int) -> str:
        """Return the digest of a portion, as works state it."""

    def merge(self, record: Merged, payloads: Sequence[bytes]) -> None:
        """Move the portion of a merge by it."""


def replay(
    records: Sequence[Record],
    bases: Sequence[int] | None,
    sea: Sea,
    payload: Callable[[Part], bytes],
    *,
    progress: Callable[[int], None] = lambda merges: None,
) -> list[Replayed]:
    """Repeat the merges of a logbook; return one outcome for each.

    ``sea`` has the weights after ``bases`` merges of each portion, None for unknown weights.
    ``payload`` raises ``NotFoundError`` for one that is gone, ``CorruptError`` for one that is
    damaged. ``progress`` is told of every merge.
    """
    founded = next(each for each in records if isinstance(each, Founded))
    portions = [
        _Portion(at, None if bases is None else bases[at], sea, payload)
        for at in range(founded.settings.portions)
    ]
    found = []
    for record in records:
        if isinstance(record, Merged):
            found.append(portions[record.portion].repeat(record))
            progress(1)
    return found


class _Portion:
    """One portion: ``known`` while its weights are those after ``merges`` merges."""

    def __init__(
        self, at: int, base: int | None, sea: Sea, payload: Callable[[Part], bytes]
    ) -> None:
        self._at, self._base, self._sea, self._payload = at, base, sea, payload
        self._merges, self._is_known = 0, base is not None
        self._last: Replayed | None = None

    def repeat(self, record: Merged) -> Replayed:
        """Repeat the next merge, and judge by its works the one before."""
        found = Replayed(
            tide=record.tide,
            portion=record.portion,
            islands=tuple(part.island for part in record.parts),
            outcome="earlier",
        )
        if self._base is None or self._merges >= self._base:
            self._judge(record)
            self._make(record, found)
        self._merges, self._last = self._merges + 1, found
        return found

    def _judge(self, record: Merged) -> None:
        """Compare the present weights with those that the works of a merge state."""
        stated = {part.state for part in record.parts if part.base == self._merges}
        if not self._is_known or not stated:
            return
        mine = self._sea.digest(self._at)
        if stated == {mine}:
            if self._last is not None and self._last.outcome == "repeated":
                self._last.outcome = "verified"
            return
        self._is_known = False
        if self._last is not None:
            self._last.outcome = "differs"
            self._last.why = f"islands state the digest {min(stated)}, the replay has {mine}"

    def _make(self, record: Merged, found: Replayed) -> None:
        try:
            payloads = [self._payload(part) for part in record.parts]
        except (NotFoundError, CorruptError) as error:
            is_gone = isinstance(error, NotFoundError)
            found.outcome, found.why = "no payload" if is_gone else "damaged", str(error)
            self._is_known = False
            return
        if not self._is_known:
            found.outcome = "no weights"
            return
        self._sea.merge(record, payloads)
        found.outcome = "repeated"
