"""A sequence is put together from stretches of an earlier one, or refused."""

from __future__ import annotations

import pytest

from holdfast.elastic.membership import stretches as module
from holdfast.elastic.membership.stretches import Stretch, joined, stretches


def test_what_stays_together_is_one_stretch() -> None:
    old = [f"n{number}" for number in range(1000)]
    new = [*old[:400], *old[401:900], "x", *old[950:], "n3"]
    found = stretches(old, new)
    assert found == (
        Stretch(0, 400),
        Stretch(401, 499, ("x",)),
        Stretch(950, 50),
        Stretch(3, 1),
    )
    assert joined(old, found) == new


@pytest.mark.parametrize(
    ("old", "new"),
    [("", ""), ("", "ab"), ("ab", ""), ("aabbcc", "abc"), ("abc", "aabbcc"), ("aaab", "aaaab")],
)
def test_repeated_and_missing_items_come_back(old: str, new: str) -> None:
    assert joined(list(old), stretches(list(old), list(new))) == list(new)


def test_an_item_that_is_found_and_differs_is_told() -> None:
    old, new = [("a", 1), ("b", 2)], [("a", 1), ("b", 3), ("c", 0)]
    found = stretches(old, new, key=lambda each: each[0])
    assert found == (Stretch(0, 1, (("b", 3), ("c", 0))),)


@pytest.mark.parametrize("wrong", [Stretch(-1, 1), Stretch(0, 4), Stretch(3, 1), Stretch(2, -1)])
def test_stretches_of_another_sequence_are_refused(wrong: Stretch[str]) -> None:
    with pytest.raises(ValueError, match="of 3"):
        joined(["a", "b", "c"], [wrong])


def test_a_sequence_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ITEMS", 5)
    with pytest.raises(ValueError, match="more than 5 items"):
        joined(["a", "b", "c"], [Stretch(0, 3), Stretch(0, 3)])
