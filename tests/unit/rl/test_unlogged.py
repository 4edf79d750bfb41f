"""Tokens that wait for their record in a log."""

from __future__ import annotations

import pytest

from holdfast.adapters.rl.samples.trajectory import Delta, Stamp
from holdfast.adapters.rl.samples.unlogged import Unlogged


def delta(ordinal: int, tokens: int = 1) -> Delta:
    """Return a delta of an answer."""
    return Delta(
        ordinal=ordinal,
        sample=0,
        start=0,
        tokens=(5,) * tokens,
        logprobs=(-1.0,) * tokens,
        stamps=(Stamp(generation=0, version=0, count=tokens),),
    )


def test_tokens_wait_until_there_are_enough_or_a_sample_is_finished() -> None:
    records: list[list[int]] = []
    unlogged = Unlogged(3, lambda deltas: records.append([each.ordinal for each in deltas]))
    unlogged.add(delta(1, 2), finished=False)
    assert records == []
    unlogged.add(delta(2), finished=False)
    assert records == [[1, 2]]
    unlogged.keep(delta(3))
    unlogged.add(delta(4), finished=True)
    assert records == [[1, 2], [3, 4]]


def test_what_is_added_in_a_block_has_one_record_though_the_block_fails() -> None:
    records: list[list[int]] = []
    unlogged = Unlogged(1, lambda deltas: records.append([each.ordinal for each in deltas]))
    with pytest.raises(InterruptedError), unlogged.together():
        unlogged.add(delta(1), finished=False)
        with unlogged.together():
            unlogged.add(delta(2), finished=True)
        assert records == []
        raise InterruptedError
    assert records == [[1, 2]]


def test_a_block_writes_nothing_that_is_not_due() -> None:
    records: list[list[Delta]] = []
    unlogged = Unlogged(2, records.append)
    with unlogged.together():
        unlogged.add(delta(1), finished=False)
    assert records == []
    assert [each.ordinal for each in unlogged.take()] == [1]
    assert unlogged.take() == []
