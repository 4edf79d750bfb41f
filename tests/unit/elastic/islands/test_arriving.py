"""Arrivals of a tide, and the courier that brings what they wait for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from doubles import seas

from holdfast.ckpt.errors import HoldfastError
from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.errors import SeaError
from holdfast.elastic.islands.arriving import Arrival
from holdfast.elastic.islands.commands import AdoptMerge, AwaitNews, Command, EnterAnew, GoOn
from holdfast.elastic.islands.courier import Courier, Outgoing
from holdfast.elastic.islands.logbook import SeaLogbook
from holdfast.elastic.islands.mailbox import Mailbox, digest_of
from holdfast.elastic.islands.messages import Asked, Sign
from holdfast.elastic.sea.records import Entered, Left
from holdfast.elastic.sea.settings import Islands, Quorum

ISLANDS = Islands(name="", meet="sea", every=4, portions=2, overlap=1, patience_s=80)
PAYLOAD_BYTES = 8


@dataclass
class Member:
    """An island of two, ``a`` and ``b``, which turns when the test says so."""

    folder: Path
    name: str
    wait: Literal["all"] | Quorum = "all"
    now_s: float = 0.0
    adopted: int = 0
    protected: bool = True
    needs: int = 0
    told: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        store = LocalStore(self.folder)
        self.islands = replace(ISLANDS, name=self.name, wait=self.wait)
        self.logbook, self.mailbox = SeaLogbook(store, island=self.name), Mailbox(store)
        self.logbook.poll()
        if self.logbook.view.founded is None:
            founded = seas.founded(self.islands).founded
            assert founded is not None
            self.logbook.append(founded)
        number = self.logbook.view.length
        self.logbook.append(
            Entered(number=number, island=self.name, tide=0, weight=8, lineage=number)
        )
        self.courier = self.opened(number)

    def opened(self, lineage: int) -> Courier:
        """Return a courier that begins with the logbook."""
        return Courier(
            self.logbook,
            self.mailbox,
            self.islands,
            lineage=lineage,
            clock=lambda: self.now_s,
            protected=lambda _: self.protected,
            sign=lambda n: Sign(island=self.name, run=self.name, number=n, needs=self.needs),
            told=lambda work, _: self.told.append(work.tide),
        )

    def go_back(self, adopted: int, *, place: str) -> None:
        """Begin again with the state after so many merges, from its place in the logbook."""
        self.logbook = SeaLogbook(LocalStore(self.folder), island=self.name)
        if place:
            self.logbook.resume(place)
        self.logbook.poll()
        self.courier, self.adopted = self.opened(self.courier.lineage), adopted

    def send(self) -> None:
        """Send the work of the next tide."""
        payload = f"{self.name}{self.adopted:07d}".encode()
        work = seas.work(self.logbook.view, self.name, digest=digest_of(payload))
        portion = self.adopted % 2
        base = (self.adopted + 1 - portion) // 2
        changes = {"tide": self.adopted, "portion": portion, "base": base, "nbytes": len(payload)}
        state = seas.digest(f"state{portion}.{base}")
        work = msgspec.structs.replace(work, state=state, **changes)
        self.courier.send([Outgoing(work=work, payload=payload, step=1)])

    def arrival(self, *, hurries: bool = False) -> Arrival:
        """Return an arrival; whatever is awaited comes with the next turn."""
        return Arrival(
            self.courier,
            self.islands,
            adopted=lambda: self.adopted,
            weight=8,
            nbytes=lambda _: PAYLOAD_BYTES,
            await_news=lambda _: self.turn(),
            check=lambda: None,
            clock=lambda: self.now_s,
            hurries=hurries,
        )

    def turn(self) -> None:
        """Make a round of the courier, some seconds after the last one."""
        self.now_s += 3
        self.courier.turn()

    def adopt(self, arrival: Arrival) -> list[int]:
        """Let an arrival come to its end; return the tides that were adopted."""
        found = []
        while not isinstance(said := self.says(arrival), GoOn):
            assert isinstance(said, AdoptMerge), said
            found.append(said.tide)
            self.adopted += 1
            self.courier.adopted(said.tide)
        return found

    def says(self, arrival: Arrival) -> Command:
        """Return the next command that is not to wait, or the third."""
        for _ in range(3):
            said, self.data = arrival.next()
            if not isinstance(said, AwaitNews):
                break
        return said


@pytest.fixture
def two(tmp_path: Path) -> tuple[Member, Member]:
    return Member(tmp_path, "a"), Member(tmp_path, "b")


def test_a_merge_is_written_before_training_waits_for_it(tmp_path: Path) -> None:
    a, b = Member(tmp_path, "a"), Member(tmp_path, "b")
    for member in (a, b):
        member.turn()
        member.send()
    for member in (a, b, a):
        member.now_s += 0.1  # too soon for the next look at signs of life
        member.courier.turn()
    assert 0 in a.logbook.merged


def test_a_tide_is_adopted_once_all_have_sent_their_work(two: tuple[Member, Member]) -> None:
    first, second = two
    first.send()
    arrival = first.arrival()
    assert first.says(arrival) == AwaitNews()
    second.send()
    second.turn()
    said = first.says(arrival)
    assert isinstance(said, AdoptMerge)
    assert (said.tide, said.portion, said.weights, said.whole, said.own) == (0, 0, (10, 10), 20, 0)
    assert first.data == [b"a0000000", b"b0000000"]
    assert second.adopt(second.arrival()) == [0]


def test_a_work_is_published_once_its_step_is_protected_or_training_waits_long(
    two: tuple[Member, Member],
) -> None:
    first, _ = two
    first.protected = False
    first.send()
    first.turn()
    assert first.told == []
    first.protected = True
    first.turn()
    assert first.told == [0]
    first.protected, first.adopted = False, 1
    first.send()
    first.arrival(hurries=True)
    first.turn()
    assert first.told == [0, 1]


def test_a_run_that_goes_back_adopts_the_same_merges_one_at_each_arrival(
    two: tuple[Member, Member],
) -> None:
    for _ in range(3):
        for each in two:
            each.send()
            each.turn()
        for each in two:
            each.courier.awaited()
            each.adopt(each.arrival())
    back = two[0]
    for adopted in range(3):
        back.go_back(adopted, place=two[1].logbook.place(adopted))
        rest = range(adopted, 3)
        assert [back.adopt(back.arrival()) for _ in rest] == [[tide] for tide in rest]


def test_an_arrival_tells_the_place_after_its_merge(two: tuple[Member, Member]) -> None:
    for each in two:
        each.send()
        each.turn()
    a, b = two
    a.turn()
    said = (first := a.arrival()).next()[0]
    assert isinstance(said, AdoptMerge)
    a.adopted += 1
    b.logbook.poll()
    assert b.logbook.place(1)
    assert a.says(first) == GoOn(place=b.logbook.place(1), stride=ISLANDS.stride)


def test_with_a_quorum_all_merges_that_are_there_are_adopted(tmp_path: Path) -> None:
    fast, slow = (Member(tmp_path, name, wait=Quorum(0.5)) for name in ("a", "b"))
    slow.send()
    for _ in range(3):
        fast.send()
        fast.turn()
        fast.adopt(fast.arrival())
    slow.turn()
    assert slow.adopt(slow.arrival()) == [0, 1, 2]


def test_a_silent_island_is_put_out_and_enters_again_behind_the_others(
    two: tuple[Member, Member],
) -> None:
    first, silent = two
    first.send()
    arrival = first.arrival()
    for _ in range(12):
        first.says(arrival)
    assert list(first.logbook.view.members) == ["a"]
    first.adopt(arrival)
    silent.send()
    silent.turn()
    assert silent.adopt(silent.arrival()) == [0]
    silent.turn()
    member = silent.logbook.view.members["b"]
    assert (member.lineage, member.joined > member.lineage) == (silent.courier.lineage, True)


def test_an_island_whose_payloads_are_gone_enters_anew(two: tuple[Member, Member]) -> None:
    first, second = two
    for each in (first, second):
        each.send()
        each.turn()
    first.turn()
    late = two[1]
    late.logbook.poll()
    for member in two:
        member.mailbox.store.delete([f"payloads/a/{digest_of(b'a0000000')}"])
    late.courier.freight.keep(set())
    assert late.says(late.arrival()) == EnterAnew()


def _refused(member: Member) -> HoldfastError:
    with pytest.raises(SeaError) as found:
        member.says(member.arrival())
    return found.value


def test_an_island_whose_name_another_run_took_stops(two: tuple[Member, Member]) -> None:
    first, second = two
    number = first.logbook.view.length
    second.logbook.append(Left(number=number + 1, island="a", why="lost"))
    number = second.logbook.view.length
    second.logbook.append(Entered(number=number, island="a", tide=0, weight=8, lineage=number))
    first.logbook.poll()
    assert "another run has joined the sea at sea as a" in str(_refused(first))


def test_an_island_that_went_astray_stops(two: tuple[Member, Member]) -> None:
    first, _ = two
    first.logbook.poll()
    view = first.logbook.view
    wrong = seas.work(view, "a", weight=1, state=seas.digest("other"))
    seen = (wrong.part, seas.work(view, "b").part)
    first.logbook.append(Left(number=3, island="a", why="astray", seen=seen))
    assert "are not those of the sea at sea" in str(_refused(first))


def test_two_runs_with_one_name_and_state_do_not_go_on_together(
    two: tuple[Member, Member],
) -> None:
    first, _ = two
    first.turn()
    for number in (7, 8):
        first.mailbox.show("a", Sign(island="a", run="other", number=number, needs=0))
        if number == 8:
            with pytest.raises(SeaError, match="at the same time"):
                first.turn()
        else:
            first.turn()


def test_the_first_member_by_name_answers_a_request_and_the_next_later(
    two: tuple[Member, Member],
) -> None:
    first, second = two
    request = Asked(island="c", id="c-1")
    first.mailbox.ask(request)
    for each in two:
        each.turn()
    assert first.courier.request() == request
    assert second.courier.request() is None
    second.now_s += 30
    assert second.courier.request() == request


def test_works_that_every_island_is_past_are_removed(two: tuple[Member, Member]) -> None:
    for tide in range(14):
        for each in two:
            each.needs = tide
            each.send()
            each.turn()
        for each in two:
            each.adopt(each.arrival())
    kept = [tide for _, tide, _ in two[0].mailbox.works_of("a")]
    assert kept[0] > 0
    assert kept[-1] == 13
