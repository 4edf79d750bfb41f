"""Looks at the files of a sea. Nothing is written there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.store.base import Store
from holdfast.elastic.islands.mailbox import Mailbox
from holdfast.elastic.sea.records import Entered, Record, Work, decode_record
from holdfast.elastic.sea.view import View
from holdfast.tools.islands.status import Glance, heard

PATIENCE_S: Final = 5.0
"""The seconds in which an island gives a sign of life, unless it is very busy."""

_LOGBOOK: Final = "logbook"
_POLL_S: Final = 0.5
_NEWEST: Final = 16
"""Works of an island that are read: more than can wait for a merge."""


def records_of(store: Store, *, known: tuple[Record, ...] = ()) -> tuple[Record, ...]:
    """Return the records of a sea's logbook; those that are ``known`` are not read again.

    Raises ``NotFoundError`` if there is no logbook, ``CorruptError`` for a damaged record.
    """
    names = [f"{_LOGBOOK}/{name}" for name in store.names(_LOGBOOK)]
    if not names:
        raise NotFoundError(
            f"{store.root}: there is no logbook of a sea; give the place that islands meet at "
            "(--sea of `holdfast run`, or `meet` of holdfast.Islands)"
        )
    new = names[len(known) :]
    return known + tuple(decode_record(store.read(name), origin=store.where(name)) for name in new)


def look(store: Store, *, known: tuple[Record, ...] = ()) -> Glance:
    """Read the logbook, the newest works and signs of life of its islands, and the open requests.

    Records that are ``known`` are not read again.

    Raises ``NotFoundError`` if there is no logbook, ``CorruptError`` for a damaged file.
    """
    at_s, box = time.monotonic(), Mailbox(store)
    records = records_of(store, known=known)
    islands = dict.fromkeys(each.island for each in records if isinstance(each, Entered))
    signs = {island: sign for island in islands if (sign := box.sign(island)) is not None}
    return Glance(
        at_s=at_s,
        records=records,
        view=View.of(records),
        works={island: _works(box, island) for island in islands},
        signs=signs,
        asked=tuple(sorted(each.island for each in box.asked())),
    )


def _works(box: Mailbox, island: str) -> tuple[Work, ...]:
    """Return the newest works of an island; one that its owner removes meanwhile is left out."""
    newest = sorted(box.works_of(island))[-_NEWEST:]
    found = (box.work(island, *numbers) for numbers in newest)
    return tuple(work for work in found if work is not None)


def listen(
    store: Store,
    before: Glance,
    *,
    for_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Glance:
    """Return a look at the sea ``for_s`` seconds after ``before``.

    With None it is the first at which all members have given a sign of life, or one after
    `PATIENCE_S`.
    """
    limit_s = PATIENCE_S if for_s is None else for_s
    while True:
        left_s = before.at_s + limit_s - time.monotonic()
        sleep(max(min(_POLL_S, left_s), 0.0))
        if for_s is None or left_s <= _POLL_S:
            after = look(store, known=before.records)
            if left_s <= _POLL_S or after.view.members.keys() <= heard(before, after):
                return after
