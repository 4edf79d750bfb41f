"""The dealing of samples: whatever is recorded, each sample is merged, in one hand, or nobody's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import pytest
from doubles import seas
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.elastic.data.hand import Hand
from holdfast.elastic.errors import SeaError
from holdfast.elastic.islands.counters import IslandCounters
from holdfast.elastic.sea import dealing, place
from holdfast.elastic.sea.dealing import Blocks, Supply
from holdfast.elastic.sea.records import Dealt, DealtData, Entered, Left
from holdfast.elastic.sea.settings import Islands, Quorum
from holdfast.elastic.sea.view import View

ISLANDS = Islands(every=4, portions=2, overlap=1, data="dealt", wait=Quorum(0.1), founders=2)
BLOCKS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9))).map(
    lambda found: tuple((start, start + count) for start, count in found)
)


def positions(blocks: Blocks) -> list[int]:
    return [at for start, stop in blocks for at in range(start, stop)]


@settings(max_examples=examples(200), deadline=None)
@given(BLOCKS, st.integers(0, 120))
def test_a_cut_parts_blocks_without_changing_their_order(blocks: Blocks, first: int) -> None:
    before, after = dealing.cut(blocks, first)
    assert positions(before) == positions(blocks)[:first]
    assert positions(before) + positions(after) == positions(blocks)
    assert positions(dealing.joined(blocks)) == positions(blocks)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1), st.none() | st.integers(0, 200))
def test_shares_are_what_is_wanted_or_all_that_there_is(
    wanted: list[int], available: int | None
) -> None:
    found = dealing.shares(wanted, available)
    assert all(0 <= got <= want for got, want in zip(found, wanted, strict=True))
    assert sum(found) == min(sum(wanted), sum(wanted) if available is None else available)


class Chain:
    """A sea that deals, as its records make it; ``hands`` are all blocks of each lineage."""

    def __init__(self, data: DealtData) -> None:
        self.view = seas.founded(ISLANDS, dealt=data)
        self.hands: dict[tuple[str, int], list[int]] = {}
        self.merged: Counter[int] = Counter()
        self.trained: dict[str, int] = {}

    def write(self, record: Any) -> None:
        before = self.view
        self.view = before.after(record)
        for name, member in self.view.members.items():
            hand = self.hands.setdefault((name, member.lineage), [])
            old = before.members.get(name)
            known = old.dealt if old is not None and old.lineage == member.lineage else 0
            assert member.dealt >= known, "a hand only grows"
            all_of_it = positions(member.blocks)
            new = all_of_it[len(all_of_it) - (member.dealt - known) :]
            hand += new
            assert hand[member.merged_samples :] == all_of_it
        assert place.decode(place.encode(self.place())).supply == self.view.supply

    def place(self) -> place.LogbookPlace:
        return place.place_of(self.view, before=place.START, digest=place.START, left=None)

    def act(self, what: str, name: str, amount: int) -> None:
        """Write a record of that kind, if one follows."""
        view, number = self.view, self.view.length
        member = view.members.get(name)
        if what == "enter" and member is None:
            self.trained[name] = 0
            tide, need = view.tide, 1 + amount
            self.write(
                Entered(number=number, island=name, tide=tide, weight=1, lineage=number, need=need)
            )
        elif member is None:
            return
        elif what == "leave":
            why: Literal["done", "silent"] = "done" if amount % 2 else "silent"
            self.write(Left(number=number, island=name, why=why))
        elif what == "ask":
            if view.supply is not None and view.supply.is_open and view.supply.left != 0:
                self.write(Dealt(number=number, island=name, upto=member.dealt + 1 + amount))
        elif view.tide or len(view.members) >= view.settings.founders:
            self.trained[name] = min(member.dealt, self.trained[name] + amount)
            work = seas.work(view, name, trained=self.trained[name])
            self.write(seas.merged(view, work))

    def check(self) -> None:
        """Every position that was ever dealt is merged, in one hand, or to be dealt again."""
        supply = self.view.supply
        assert supply is not None
        found = Counter[int]()
        for (name, lineage), hand in self.hands.items():
            now = self.view.members.get(name) or self.view.former[name]
            if now.lineage == lineage:
                self.kept[name, lineage] = now.merged_samples
            found.update(hand[: self.kept[name, lineage]])
        for member in self.view.members.values():
            found.update(positions(member.blocks))
        found.update(positions(supply.returned))
        assert found == Counter(range(supply.fresh))

    @property
    def kept(self) -> dict[tuple[str, int], int]:
        """The merged samples of each lineage."""
        return self.__dict__.setdefault("_kept", {})


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "merge", "merge", "merge", "ask", "leave"]),
        st.sampled_from("abc"),
        st.integers(0, 30),
    ),
    max_size=40,
)


@settings(max_examples=examples(150), deadline=None)
@given(ACTS, st.integers(1, 60), st.none() | st.integers(1, 3))
def test_every_sample_is_merged_once_or_in_one_hand_or_nobodys(
    acts: list[tuple[str, str, int]], samples: int, epochs: int | None
) -> None:
    chain = Chain(DealtData(samples=samples, order="x", seed=0, epochs=epochs))
    for what, name, amount in acts:
        chain.act(what, name, amount)
        chain.check()


def test_the_founders_are_dealt_alike_whoever_was_first() -> None:
    data = DealtData(samples=90, order="x", seed=0)
    found = []
    for names in ("ab", "ba"):
        chain = Chain(data)
        for name in names:
            chain.act("enter", name, 11 if name == "a" else 4)
        found.append({name: each.blocks for name, each in chain.view.members.items()})
    assert found[0] == found[1] == {"a": ((0, 12),), "b": ((12, 17),)}


def test_what_a_leaver_did_not_have_merged_in_all_portions_is_dealt_first() -> None:
    chain = Chain(DealtData(samples=90, order="x", seed=0))
    for name in "ab":
        chain.act("enter", name, 9)
    chain.act("merge", "a", 6)  # portion 0
    chain.act("merge", "a", 2)  # portion 1, at 8
    assert chain.view.members["a"].merged_samples == 6
    chain.act("leave", "a", 0)
    supply = chain.view.supply
    assert supply is not None
    assert positions(supply.returned)[:4] == [6, 7, 8, 9]
    chain.act("enter", "c", 3)
    assert chain.view.members["c"].blocks == ((6, 10),)


def test_records_that_deal_wrongly_do_not_follow() -> None:
    chain = Chain(DealtData(samples=5, order="x", seed=0, epochs=1))
    chain.act("enter", "a", 9)
    with pytest.raises(SeaError, match="does not deal samples yet"):
        chain.view.after(Dealt(number=2, island="a", upto=20))
    chain.act("enter", "b", 9)
    view, number = chain.view, chain.view.length
    assert [each.dealt for each in view.members.values()] == [3, 2]
    for record, message in (
        (Dealt(number=number, island="c", upto=3), "c takes no part"),
        (Dealt(number=number, island="a", upto=3), "a has 3 samples, and wants 3"),
        (Dealt(number=number, island="a", upto=9), "all samples are dealt"),
        (Entered(number=number, island="c", tide=0, weight=1, lineage=number), "needs 0 samples"),
        (
            seas.merged(view, seas.work(view, "a", trained=4)),
            "has 4 samples, merged are 0, dealt 3",
        ),
    ):
        with pytest.raises(SeaError, match=message):
            view.after(record)
    assert not view.fits(seas.work(view, "a", trained=4))
    chain.act("leave", "a", 0)
    back = Entered(number=number + 1, island="a", tide=0, weight=1, lineage=1, need=3)
    with pytest.raises(SeaError, match="whose samples were given to others"):
        chain.view.after(back)
    own = seas.entered(seas.founded(replace(ISLANDS, data="own")), "a")
    with pytest.raises(SeaError, match="does not deal samples yet"):
        own.after(Dealt(number=2, island="a", upto=3))


def _hand(data: DealtData, batch: int) -> tuple[Hand, IslandCounters]:
    counters = IslandCounters("a", portions=1)
    hand = Hand(lambda: counters.now)
    hand.deal_from(data, batch=batch, ahead=0)
    hand.begin(())
    return hand, counters


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.integers(1, 9),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_steps_take_a_hand_in_order_however_it_grows(
    sizes: list[int], batch: int, samples: int, random: Any
) -> None:
    """Steps that were read ahead are those that come, and none has samples of two epochs."""
    supply, blocks = Supply(), []
    for size in sizes:
        taken, supply = supply.take(size)
        blocks.append(taken)
    random.shuffle(blocks)
    hand, _ = _hand(DealtData(samples=samples, order="x", seed=0), batch)
    trained, ahead = list[int](), list[Any]()
    waiting = [*blocks]
    while waiting or hand.left:
        if waiting and (hand.left < batch or random.random() < 0.3):
            hand.receive(waiting.pop())
            continue
        step = hand.next_step()
        if ahead:
            assert ahead.pop(0) == step
        assert 0 < step.count <= batch
        parts = hand.positions(range(step.start, step.start + step.count))
        trained += [step.epoch * samples + at for part in parts for at in part]
        assert all(part.stop <= samples for part in parts)
        ahead = list(hand.steps_after(step))[:3]
        hand.advance(step.count)
    assert trained == positions(tuple(b for each in reversed(blocks) for b in each))


def test_a_view_of_records_is_the_same_wherever_they_are_folded() -> None:
    chain = Chain(DealtData(samples=7, order="x", seed=0, epochs=2))
    for what, name in (("enter", "a"), ("enter", "b"), ("merge", "a"), ("leave", "b")):
        chain.act(what, name, 4)
    assert chain.view.founded is not None
    again: View = chain.place().view(chain.view.founded)
    assert again == chain.view
