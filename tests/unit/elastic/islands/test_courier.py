"""The courier's round; the simulated seas have all that comes of it."""

from __future__ import annotations

from pathlib import Path

from doubles import seas

from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.islands.courier import Courier
from holdfast.elastic.islands.logbook import SeaLogbook
from holdfast.elastic.islands.mailbox import Mailbox, digest_of
from holdfast.elastic.islands.messages import Sign
from holdfast.elastic.sea.records import Entered
from holdfast.elastic.sea.settings import Islands

ISLANDS = Islands(name="a", meet="sea", every=4, portions=2, overlap=1)


def _merged(folder: Path, tides: int) -> SeaLogbook:
    """Return the logbook of two islands after so many merges, with payloads of 130 bytes."""
    store, view = LocalStore(folder), seas.founded(ISLANDS)
    logbook, mailbox = SeaLogbook(store, island="a"), Mailbox(store)
    assert view.founded is not None
    logbook.append(view.founded)
    for name in "ab":
        number = logbook.view.length
        logbook.append(Entered(number=number, island=name, tide=0, weight=10, lineage=number))
    for tide in range(tides):
        works = []
        for name in "ab":
            payload = f"{name}{tide}".encode() * 65
            works.append(seas.work(logbook.view, name, digest=digest_of(payload)))
            mailbox.publish(works[-1], payload)
        logbook.append(seas.merged(logbook.view, *works))
    return logbook


def test_a_run_that_goes_back_fetches_the_merge_that_it_adopts_again_ahead(tmp_path: Path) -> None:
    before = _merged(tmp_path, 3)
    logbook, mailbox = SeaLogbook(LocalStore(tmp_path), island="a"), Mailbox(LocalStore(tmp_path))
    logbook.resume(before.place(2))
    courier = Courier(
        logbook,
        mailbox,
        ISLANDS,
        lineage=1,
        adopted=2,
        clock=lambda: 0.0,
        protected=lambda _: False,
        sign=lambda number: Sign(island="a", run="r", number=number, needs=0),
    )
    courier.turn()
    assert mailbox.fetched == 130, "that of the other; its own it sends again"
    assert courier.payloads(logbook.merged[2]) == [b"a2" * 65, b"b2" * 65]
    assert mailbox.fetched == 2 * 130
