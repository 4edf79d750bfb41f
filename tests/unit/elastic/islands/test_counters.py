"""An island's numbers: weights of works, portions that are due, and what a restore brings back."""

from __future__ import annotations

import pytest

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.islands.counters import IslandCounters, Sent
from holdfast.elastic.sea.settings import Islands


def _sent(portion: int, samples: int) -> Sent:
    return Sent(
        tide=0,
        portion=portion,
        step=1,
        digest="0" * 32,
        nbytes=1,
        weight=1,
        samples=samples,
        base=0,
        state="0" * 32,
    )


def test_a_work_weighs_the_samples_since_the_last_one_in_each_merge() -> None:
    counters = IslandCounters("a", portions=2)
    counters.now.samples = 80
    assert counters.weight(0) == 80
    counters.now.sents = [_sent(0, 80)]
    counters.now.samples = 90
    counters.note_adopted(0, state="s", step=9, named=True)
    counters.now.samples = 160
    assert counters.weight(0) == 80, "the ten of before count for the next work"
    counters.note_adopted(0, state="s", step=20, named=False)
    assert counters.weight(0) == 40, "two merges, and it was in none"


def test_an_island_sends_as_many_portions_as_were_merged_since_the_last_time() -> None:
    counters = IslandCounters("a", portions=3)
    assert counters.due() == [0]
    counters.now.adopted = 4
    counters.note_arrived(2)
    assert counters.due() == [1, 2]
    counters.note_arrived(9)
    assert counters.due() == [1, 2, 0]


def test_the_merges_of_an_earlier_step_are_known_or_fewer() -> None:
    counters = IslandCounters("a", portions=2)
    counters.now.entered = counters.now.adopted = 5
    for step in (10, 20, 30):
        counters.note_adopted(0, state="s", step=step, named=False)
    assert [counters.adopted_at(step) for step in (-1, 9, 10, 25, 99)] == [5, 5, 6, 7, 8]


def test_numbers_come_back_and_only_to_their_own_island() -> None:
    counters = IslandCounters("a", portions=2)
    counters.now.sents = [_sent(1, 7)]
    counters.note_adopted(1, state="s", step=3, named=True)
    again = IslandCounters("a", portions=2)
    again.load_state_dict(counters.state_dict())
    assert again.now == counters.now
    with pytest.raises(ConfigError, match=r"island 'a', this one is 'b'.*Islands\(name='a'\)"):
        IslandCounters("b", portions=2).load_state_dict(counters.state_dict())
    with pytest.raises(ConfigError, match="2 portions, this one 3"):
        IslandCounters("a", portions=3).load_state_dict(counters.state_dict())


def test_an_island_that_enters_anew_keeps_only_its_samples() -> None:
    counters = IslandCounters("a", portions=2)
    counters.now.samples, counters.now.lineage = 64, 3
    counters.note_adopted(0, state="s", step=3, named=True)
    counters.begin_anew()
    assert (counters.now.lineage, counters.now.adopted, counters.now.bases) == (-1, 0, [0, 0])
    assert counters.now.since == [64, 64]


def test_a_tide_begins_after_every_stride_or_after_the_steps_that_were_agreed() -> None:
    counters = IslandCounters("a", portions=2)
    alike = Islands(every=8, portions=2, overlap=1)
    assert [step for step in range(1, 13) if counters.departs(step, alike)] == [4, 8, 12]
    by_speed = Islands(every=8, portions=2, overlap=1, least_every=4)
    counters.now.departs = 4
    assert [step for step in range(1, 5) if counters.departs(step, by_speed)] == [4]
    counters.note_departed(0, step=4, digest="0" * 32, nbytes=8, step_us=7)
    assert counters.work_of(counters.now.sents[0]).step_us == 7
    assert not counters.departs(9, by_speed), "one is under way"
    counters.note_arrived(1, stride=3)
    assert [step for step in range(5, 8) if counters.departs(step, by_speed)] == [7]
