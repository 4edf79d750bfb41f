"""OpenRequests for weights: members answer in turn, and remove what nobody waits for any more."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.islands.mailbox import Mailbox
from holdfast.elastic.islands.messages import Asked, Given
from holdfast.elastic.islands.requests import OpenRequests

REQUEST = Asked(island="c", id="c-1")
MEMBERS = ("a", "b")


@dataclass
class Member:
    """A member that looks at the requests when the test says so."""

    mailbox: Mailbox
    name: str
    removed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.requests = OpenRequests(
            self.mailbox, me=self.name, beat_s=2, patience_s=60, remove=self.remove
        )

    def remove(self, root: str) -> None:
        self.removed.append(root)
        (Path(root) / "weights").unlink()

    def look(self, now: float, *, missed_s: float = 0.0) -> None:
        self.requests.look(now, missed_s=missed_s)
        self.requests.tidy(MEMBERS, now)


@pytest.fixture
def mailbox(tmp_path: Path) -> Mailbox:
    return Mailbox(LocalStore(tmp_path))


def _give(mailbox: Mailbox, by: str) -> str:
    """Answer, with one file for weights; return their root."""
    mailbox.store.write(f"given/{REQUEST.id}/{by}/weights", [b"w"])
    mailbox.give(REQUEST, Given(by=by, tide=3, bases=(2, 1)))
    return mailbox.given_root(REQUEST, by=by)


def test_members_answer_in_turn_until_there_is_an_answer(mailbox: Mailbox) -> None:
    first, second = Member(mailbox, "a"), Member(mailbox, "b")
    mailbox.ask(REQUEST)
    for each in (first, second):
        each.look(10)
    assert first.requests.mine(MEMBERS, 10) == REQUEST
    assert second.requests.mine(MEMBERS, 10) is None
    assert second.requests.mine(MEMBERS, 14) == REQUEST
    assert second.requests.mine(("a", "c"), 14) is None, "it takes no part"
    _give(mailbox, "a")
    assert first.requests.mine(MEMBERS, 14) is None


def test_a_request_without_signs_of_life_is_removed_after_the_patience(mailbox: Mailbox) -> None:
    first = Member(mailbox, "a")
    mailbox.ask(REQUEST)
    first.look(0)
    mailbox.ask(msgspec.structs.replace(REQUEST, beat=1))
    assert first.requests.look(50) == {"c"}
    assert first.requests.look(51) == set()
    first.look(100)
    assert mailbox.is_open(REQUEST)
    first.look(111)
    assert not mailbox.is_open(REQUEST)
    assert first.requests.mine(MEMBERS, 112) is None


def test_time_in_which_nobody_looked_is_not_the_silence_of_the_one_that_asks(
    mailbox: Mailbox,
) -> None:
    first = Member(mailbox, "a")
    mailbox.ask(REQUEST)
    first.look(0)
    first.look(1000, missed_s=996)
    assert mailbox.is_open(REQUEST)
    first.look(1060)
    assert not mailbox.is_open(REQUEST)


def test_an_island_that_loads_what_it_was_given_has_more_time(mailbox: Mailbox) -> None:
    first, second = Member(mailbox, "a"), Member(mailbox, "b")
    mailbox.ask(REQUEST)
    root = _give(mailbox, "a")
    for each in (second, first):
        each.look(0)
        each.look(600)
        assert mailbox.is_open(REQUEST)
    first.look(601)
    assert not mailbox.is_open(REQUEST)
    assert (first.removed, second.removed) == ([root], [])
    assert mailbox.given(REQUEST) is None


def test_answers_to_closed_requests_are_removed_by_the_first_member(mailbox: Mailbox) -> None:
    first, second = Member(mailbox, "a"), Member(mailbox, "b")
    mailbox.ask(REQUEST)
    root = _give(mailbox, "b")
    mailbox.ask(Asked(island="c", id="c-2"))
    for each in (second, first):
        each.look(0)
    assert (first.removed, second.removed) == ([root], [])
    assert mailbox.asked() == [Asked(island="c", id="c-2")]
    assert mailbox.answered() == [], "no folder stays either"
