"""Calls before methods of classes end with `close`, whoever replaced the method since."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.elastic.loop.updates.interposed import Interposed


@pytest.fixture
def kind() -> Any:
    """A class with one method."""

    class Kind:
        def double(self, x: int) -> int:
            return 2 * x

    return Kind


def test_the_look_comes_first_sees_the_arguments_and_may_end_the_call(kind: Any) -> None:
    seen: list[int] = []

    def look(_: object, x: int) -> None:
        seen.append(x)
        if x < 0:
            raise ValueError("negative")

    interposed, plain = Interposed(), kind.double
    interposed.before(kind, "double", look)
    assert kind().double(3) == 6
    with pytest.raises(ValueError, match="negative"):
        kind().double(-1)
    assert seen == [3, -1]
    interposed.close()
    assert kind.double is plain


def test_two_are_closed_in_any_order(kind: Any) -> None:
    seen: list[str] = []
    first, second = Interposed(), Interposed()
    first.before(kind, "double", lambda *_: seen.append("first"))
    second.before(kind, "double", lambda *_: seen.append("second"))
    first.close()
    assert kind().double(1) == 2
    assert seen == ["second"]
    second.close()
    kind().double(1)
    assert seen == ["second"]
