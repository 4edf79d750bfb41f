"""The choice of fixed pieces follows what they did, and never flaps for long."""

from __future__ import annotations

from itertools import pairwise

from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ckpt.snapshot.fixed_choice import FixedChoice

SIZES = {"base": 800, "average": 150, "head": 50}


def fixed_at(choice: FixedChoice[str], crcs: list[dict[str, int]]) -> list[frozenset[str]]:
    """Return the choice before each snapshot; a chosen piece whose checksum differs has moved."""
    now: frozenset[str] = frozenset()
    found = []
    for step, each in enumerate(crcs):
        if step:
            moved = [piece for piece in now if each[piece] != crcs[step - 1][piece]]
            choice.moved(moved)
            now = choice.choose(SIZES, now=now - set(moved))
        found.append(now)
        choice.observe(each)
    return found


def test_a_piece_is_fixed_after_a_few_snapshots_and_moves_when_it_changes() -> None:
    same = [{"base": 1, "average": step, "head": step} for step in range(8)]
    changed = [{"base": 2, "average": step, "head": step} for step in range(8, 12)]
    found = fixed_at(FixedChoice(least_bytes=100), [*same, *changed])
    assert found == [frozenset()] * 5 + [frozenset({"base"})] * 3 + [frozenset()] * 4


def test_what_changes_every_few_steps_is_soon_left_alone() -> None:
    crcs = [{"base": 1, "average": step // 10, "head": step} for step in range(400)]
    found = fixed_at(FixedChoice(least_bytes=100), crcs)
    changes = sum(a != b for a, b in pairwise(found))
    assert changes <= 6
    assert found[-1] == {"base"}


def test_a_frozen_piece_is_fixed_at_once_unless_it_has_moved() -> None:
    choice = FixedChoice[str](least_bytes=100)
    assert choice.choose(SIZES, now=(), frozen={"base"}) == {"base"}
    choice.moved(["base"])
    assert choice.choose(SIZES, now=(), frozen={"base"}) == frozenset()


def test_too_little_to_pay_is_not_fixed() -> None:
    choice = FixedChoice[str](least_bytes=1000)
    assert choice.choose(SIZES, now=(), frozen={"base"}) == frozenset()
    assert choice.choose(SIZES, now={"base"}) == frozenset()


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries({name: st.integers(0, 2) for name in SIZES}),
        min_size=2,
        max_size=60,
    )
)
def test_a_piece_is_chosen_only_after_it_stayed_the_same(crcs: list[dict[str, int]]) -> None:
    found = fixed_at(FixedChoice(least_bytes=100), crcs)
    for step, now in enumerate(found):
        for piece in now:
            before = step - 1 if piece in found[step - 1] else step - 5
            assert before >= 0
            last = step + 1 if piece in found[step - 1] else step
            assert len({each[piece] for each in crcs[before:last]}) == 1
