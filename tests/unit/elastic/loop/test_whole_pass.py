"""A pass that is not iterated to its end is refused at the next call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.whole_pass import WholePass


def passing(whole: WholePass, count: int = 3) -> Iterator[int]:
    with whole.one():
        yield from range(count)


def test_a_pass_that_comes_to_its_end_leaves_nothing() -> None:
    whole = WholePass()
    for _ in range(2):
        assert list(passing(whole)) == [0, 1, 2]
        whole.check()
        whole.check_left()


def test_a_break_is_named_with_its_line() -> None:
    whole = WholePass()
    for number in passing(whole):
        if number == 1:
            break
    said = r"begun at test_whole_pass\.py:\d+ was left at test_whole_pass\.py:\d+ before its end"
    for check in (whole.check, whole.check_left, lambda: next(passing(whole))):
        with pytest.raises(ConfigError, match=said):
            check()


def test_a_first_microbatch_alone_is_a_pass_left() -> None:
    whole = WholePass()
    assert next(iter(passing(whole))) == 0
    with pytest.raises(ConfigError, match="was left"):
        whole.check_left()


def test_a_pass_that_waits_allows_no_end_and_no_other() -> None:
    whole = WholePass()
    waiting = passing(whole)
    next(waiting)
    whole.check_left()
    with pytest.raises(ConfigError, match="has not come to its end"):
        whole.check()
    with pytest.raises(ConfigError, match="StackDataset"):
        next(passing(whole))


def test_a_zip_that_ends_first_leaves_the_pass() -> None:
    whole = WholePass()
    assert len(list(zip(range(2), passing(whole), strict=False))) == 2
    with pytest.raises(ConfigError, match="was left"):
        whole.check()
