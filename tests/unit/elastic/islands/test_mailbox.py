"""The files by which islands meet."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from doubles import seas

from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.islands.mailbox import Mailbox, digest_of
from holdfast.elastic.islands.messages import Asked, Given, Sign
from holdfast.elastic.sea.records import Work
from holdfast.elastic.sea.settings import Islands

VIEW = seas.entered(seas.founded(Islands(every=4, portions=2, overlap=1)), "a")


def _work(payload: bytes, *, tide: int = 0) -> Work:
    made = seas.work(VIEW, "a", digest=digest_of(payload), nbytes=len(payload))
    return msgspec.structs.replace(made, tide=tide)


@pytest.fixture
def mailbox(tmp_path: Path) -> Mailbox:
    return Mailbox(LocalStore(tmp_path))


def test_a_work_is_there_with_its_payload(mailbox: Mailbox) -> None:
    work = _work(b"bytes")
    assert mailbox.publish(work, b"bytes") == work
    assert mailbox.works_of("a") == [(work.lineage, 0, 0)]
    assert mailbox.work("a", work.lineage, 0, 0) == work
    assert mailbox.payload("a", work.digest) == b"bytes"
    assert (mailbox.sent, mailbox.fetched) == (5, 5)


def test_of_two_works_of_a_tide_the_first_counts(mailbox: Mailbox) -> None:
    first, second = _work(b"first"), _work(b"second")
    mailbox.publish(first, b"first")
    assert mailbox.publish(second, b"second") == first


def test_an_island_that_went_back_sends_no_second_payload_of_a_tide(mailbox: Mailbox) -> None:
    first, second = _work(b"first"), _work(b"second")
    mailbox.publish(first, b"first")
    again = Mailbox(mailbox.store)
    assert again.publish(second, b"second") == first
    assert (again.sent, mailbox.store.names("payloads/a")) == (0, [first.digest])


def test_payloads_are_removed_with_their_works_and_others_stay(mailbox: Mailbox) -> None:
    for tide, data in enumerate((b"zero", b"one", b"two")):
        mailbox.publish(_work(data, tide=tide), data)
    mailbox.store.write(f"payloads/a/{digest_of(b'nobody')}", [b"nobody"])
    mailbox.forget_before("a", 2)
    assert [tide for _, tide, _ in mailbox.works_of("a")] == [2]
    assert mailbox.store.names("payloads/a") == [digest_of(b"two")]
    with pytest.raises(NotFoundError):
        mailbox.payload("a", digest_of(b"one"))


def test_other_bytes_than_those_of_a_name_are_refused(mailbox: Mailbox) -> None:
    mailbox.store.write(f"payloads/a/{digest_of(b'right')}", [b"wrong"])
    with pytest.raises(CorruptError, match="not those of its name"):
        mailbox.payload("a", digest_of(b"right"))


def test_signs_of_life_are_replaced(mailbox: Mailbox) -> None:
    assert mailbox.sign("a") is None
    for number in (1, 2):
        mailbox.show("a", Sign(island="a", run="r", number=number, needs=0))
    assert mailbox.sign("a") == Sign(island="a", run="r", number=2, needs=0)


def test_the_first_answer_to_a_request_counts_until_it_is_closed(mailbox: Mailbox) -> None:
    request = Asked(island="a", id="a-1")
    mailbox.ask(request)
    assert (mailbox.asked(), mailbox.given(request)) == ([request], None)
    for by in ("b", "c"):
        mailbox.give(request, Given(by=by, tide=3, bases=(2, 1)))
    answer = mailbox.given(request)
    assert answer is not None
    assert answer.by == "b"
    assert mailbox.is_open(request)
    mailbox.close_request(request)
    assert (mailbox.asked(), mailbox.given(request)) == ([], None)
    assert not mailbox.is_open(request)
    assert mailbox.store.names("given") == []


def test_a_damaged_message_is_refused_with_its_file(mailbox: Mailbox) -> None:
    mailbox.store.write("alive/a.json", [b"{}"])
    with pytest.raises(CorruptError, match=r"alive/a\.json"):
        mailbox.sign("a")
