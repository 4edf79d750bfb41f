"""The end of an island that met others in pairs: it waits until all have ended."""

from __future__ import annotations

from pathlib import Path

from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.islands.commands import AwaitNews, Command, GoOn, MergeLast, SendLast
from holdfast.elastic.islands.counters import IslandCounters
from holdfast.elastic.islands.courier import Courier, Outgoing
from holdfast.elastic.islands.logbook import SeaLogbook
from holdfast.elastic.islands.mailbox import Mailbox, digest_of
from holdfast.elastic.islands.messages import Sign
from holdfast.elastic.islands.pairs.ending import PairEnding
from holdfast.elastic.sea.records import Entered, Founded, Parameter, agreed
from holdfast.elastic.sea.settings import Islands

DATA = b"a payload"


class Shore:
    """An island at the end of its run, whose step is never protected."""

    def __init__(self, folder: Path, name: str) -> None:
        self.islands = Islands(
            name=name,
            meet="sea",
            every=4,
            portions=2,
            overlap=1,
            patience_s=60,
            founders=2,
            topology="pairs",
        )
        store = LocalStore(folder)
        self.logbook = SeaLogbook(store, island=name)
        self.counters = IslandCounters(name, portions=2)
        self.counters.now.states = ["0" * 16] * 2
        self.enter()
        self.courier = Courier(
            self.logbook,
            Mailbox(store),
            self.islands,
            lineage=self.counters.now.lineage,
            clock=lambda: 0.0,
            protected=lambda step: False,
            sign=lambda number: Sign(island=name, run="r", number=number, needs=0),
        )
        self.ending = self.new_ending()

    def enter(self) -> None:
        """Found the sea if nobody has, and join it."""
        self.logbook.poll()
        if self.logbook.view.founded is None:
            parameters = tuple(Parameter(name=f"w{at}", shape=(4,)) for at in range(2))
            settings = agreed(self.islands)
            self.logbook.append(
                Founded(number=0, settings=settings, parameters=parameters, digest="0" * 16)
            )
        number = self.counters.now.lineage = self.logbook.view.length
        name = self.islands.name
        self.logbook.append(Entered(number=number, island=name, tide=0, weight=1, lineage=number))

    def new_ending(self) -> PairEnding:
        return PairEnding(
            self.courier,
            self.islands,
            adopted=lambda: self.counters.now.adopted,
            weight=1,
            nbytes=lambda portion: len(DATA),
            await_news=lambda timeout_s: None,
            check=lambda: None,
            clock=lambda: 0.0,
        )

    def says(self) -> Command:
        """Do what the courier would, and what the command says; return the command."""
        while self.courier.turn():
            pass
        said, _ = self.ending.next()
        if isinstance(said, SendLast):
            for portion in range(2):
                sent = self.counters.note_departed(
                    portion, step=8, digest=digest_of(DATA), nbytes=len(DATA)
                )
                work = self.counters.work_of(sent, last=True)
                self.courier.send([Outgoing(work=work, payload=DATA, step=8)])
        return said


def test_the_last_merge_is_taken_once_all_have_ended(tmp_path: Path) -> None:
    one, other = Shore(tmp_path, "a"), Shore(tmp_path, "b")
    assert [type(one.says()) for _ in range(4)] == [SendLast, *[AwaitNews] * 3]
    assert one.courier.has_ended
    assert not one.courier.is_member
    assert isinstance(one.says(), AwaitNews), "b still trains"
    assert isinstance(other.says(), SendLast)
    while not other.courier.has_ended:
        other.says()
    for each in (one, other):
        each.courier.turn()
        each.ending = each.new_ending()
        merged = [each.says() for _ in range(3)]
        assert merged == [MergeLast(portion=p, weights=(1, 1)) for p in range(2)] + [GoOn()]


def test_an_island_that_went_back_finds_its_last_works_in_the_records(tmp_path: Path) -> None:
    one, other = Shore(tmp_path, "a"), Shore(tmp_path, "b")
    while not one.courier.has_ended:
        one.says()
    one.ending = one.new_ending()
    assert isinstance(one.says(), AwaitNews), "it sends nothing again"
    while not other.courier.has_ended:
        other.says()
    assert isinstance(one.says(), MergeLast)
    assert one.logbook.view.ended == ("a", "b")


def test_a_work_for_the_last_merge_is_not_for_a_meeting(tmp_path: Path) -> None:
    one, other = Shore(tmp_path, "a"), Shore(tmp_path, "b")
    while not one.courier.has_ended:
        one.says()
    assert not any(other.logbook.view.fits(work) for work in one.courier._works.values())
    other.courier.turn()
    assert other.logbook.view.partner("b") is None, "so it is alone from now on"
