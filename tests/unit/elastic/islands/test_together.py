"""Commands of rank 0 as the other ranks hear them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.ckpt.errors import StoreError
from holdfast.elastic.errors import GenerationOverError, SeaError
from holdfast.elastic.islands.commands import AwaitNews, Command, GoOn, LeaderFailed
from holdfast.elastic.islands.together import Said, Together
from holdfast.elastic.tracked.handover import Wish


class World:
    """A rank that hears what it is told, or itself at rank 0."""

    def __init__(self, rank: int = 0, heard: Any = None) -> None:
        self.rank, self._heard, self.said = rank, heard, list[Any]()
        self.guard = self

    def check(self) -> None: ...

    def beat(self) -> None: ...

    def gather(self, value: Any) -> list[Any]:
        self.said.append(value)
        return [value if self._heard is None else self._heard]


def _together(world: Any, *, patience_s: float = 600.0) -> Together:
    return Together(world, world, patience_s=patience_s)


def _raises(error: Exception) -> Any:
    def decide() -> Said:
        raise error

    return decide


def test_all_ranks_hear_the_command_and_rank_0_keeps_the_payloads() -> None:
    leader = World()
    together = _together(leader)
    assert together.told(lambda: (GoOn(lineage=3), [b"payload"])) == GoOn(lineage=3)
    assert together.data == [b"payload"]
    other = _together(World(1, leader.said[0]))
    assert other.told(_raises(AssertionError("not asked"))) == GoOn(lineage=3)


def test_all_ranks_know_the_largest_wish_of_any() -> None:
    wishes = [Wish.NONE, Wish.LEAVE, Wish.NONE]
    world: Any = World()
    together = Together(world, world, patience_s=1, wish=lambda: wishes.pop(0))
    found = []
    for _ in range(3):
        together.told(lambda: (AwaitNews(), []))
        found.append(together.wished)
    assert found == [Wish.NONE, Wish.LEAVE, Wish.NONE]
    world.gather = lambda value: [value, [{}, Wish.HALT]]
    wishes.append(Wish.NONE)
    together.told(lambda: (AwaitNews(), []))
    assert together.wished is Wish.HALT


def test_an_error_of_rank_0_ends_all_ranks() -> None:
    leader = World()
    with pytest.raises(SeaError, match="astray"):
        _together(leader).told(_raises(SeaError("astray")))
    assert leader.said == [[{"type": "LeaderFailed", "message": "astray"}, Wish.NONE]]
    with pytest.raises(SeaError, match="astray"):
        _together(World(1, leader.said[0])).told(lambda: (GoOn(), []))
    assert LeaderFailed(message="astray").message == "astray"


def test_the_end_of_a_generation_is_no_error_of_the_sea() -> None:
    with pytest.raises(GenerationOverError):
        _together(World()).told(_raises(GenerationOverError("over")))


def test_a_store_that_fails_is_asked_again_until_patience_is_over() -> None:
    answers: list[Any] = [StoreError("away"), OSError("away"), GoOn()]

    def decide() -> Said:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found, []

    found: Command = _together(World()).settled(decide)
    assert found == GoOn()
    together = _together(World(), patience_s=0.0)
    assert together.told(_raises(StoreError("away"))) == AwaitNews()
    with pytest.raises(StoreError, match="away"):
        together.settled(_raises(StoreError("away")))
