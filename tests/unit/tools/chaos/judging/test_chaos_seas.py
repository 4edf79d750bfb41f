"""The checks of a sea find what is planted into its story, and nothing in a sound one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from doubles.written_seas import WrittenSea

from holdfast.elastic.sea.records import Merged
from holdfast.tools.chaos.judging.checker import CHECKS, HistoryVerdict, Violation
from holdfast.tools.chaos.judging.seas import (
    SEA_CHECKS,
    RepeatedTide,
    SeaStory,
    check_sea,
    together,
)
from holdfast.tools.islands.glance import records_of

ISLANDS = ("lyon", "oslo")
TIDES = 4


@pytest.fixture
def told(tmp_path: Path) -> SeaStory:
    """The story of a sea of two islands and four tides."""
    waters = WrittenSea(tmp_path)
    digests = {}
    for tide in range(TIDES):
        waters.merge()
        digests[tide] = waters.truth.digest(tide % 2)
    for name in ISLANDS:
        waters.leave(name)
    adopted = {tide: frozenset({digest}) for tide, digest in digests.items()}
    return SeaStory(
        records=records_of(waters.store),
        adopted=dict.fromkeys(ISLANDS, adopted),
        ends=dict.fromkeys(ISLANDS, frozenset({"end"})),
        repeated=tuple(
            RepeatedTide(tide=tide, outcome="verified", digest=digest)
            for tide, digest in digests.items()
        ),
    )


def broken(told: SeaStory, *, reference: SeaStory | None = None) -> dict[str, str]:
    found = check_sea(told, reference=reference)
    return {each.check: each.message for each in found.violations}


def test_a_sound_sea_keeps_every_promise(told: SeaStory) -> None:
    found = check_sea(told, reference=told)
    assert found.held
    assert found.checked == SEA_CHECKS


def test_what_nobody_told_is_not_checked(told: SeaStory) -> None:
    bare = msgspec.structs.replace(told, ends={}, repeated=())
    assert set(SEA_CHECKS) - set(check_sea(bare).checked) == {
        *("equal weights at the end", "replay of the logbook", "sea of the reference"),
    }


def test_a_record_that_is_missing_breaks_the_logbook(told: SeaStory) -> None:
    short = msgspec.structs.replace(told, records=(*told.records[:3], *told.records[4:]))
    assert "does not follow" in broken(short)["one logbook"]
    assert broken(SeaStory(records=(), adopted={})) == {"one logbook": "the logbook has no merge"}


def test_a_work_that_is_merged_again_is_named(told: SeaStory) -> None:
    records = list(told.records)
    at = max(at for at, each in enumerate(records) if isinstance(each, Merged))
    last = records[at]
    assert isinstance(last, Merged)
    old = msgspec.structs.replace(last.parts[0], base=0)
    records[at] = msgspec.structs.replace(last, parts=(old, *last.parts[1:]))
    found = broken(msgspec.structs.replace(told, records=tuple(records)))
    assert "merge 1 has it already" in found["own work once"]


def test_islands_that_differ_after_a_tide_are_named(told: SeaStory) -> None:
    other = {**told.adopted["oslo"], 2: frozenset({"feed"})}
    story = msgspec.structs.replace(told, adopted={**told.adopted, "oslo": other})
    found = broken(story)
    assert found["equal weights after every tide"].startswith("after tide 2 lyon have ")
    assert "islands with" in found["replay of the logbook"]


def test_an_island_that_executes_a_tide_again_comes_out_with_the_same(told: SeaStory) -> None:
    own = next(iter(told.adopted["oslo"][1]))
    twice = {**told.adopted["oslo"], 1: frozenset({own, "feed"})}
    story = msgspec.structs.replace(told, adopted={**told.adopted, "oslo": twice})
    assert "after tide 1" in broken(story)["equal weights after every tide"]


def test_ends_are_compared_of_islands_that_left_after_the_same_tide(told: SeaStory) -> None:
    ends = {"lyon": frozenset({"end"}), "oslo": frozenset({"other"})}
    story = msgspec.structs.replace(told, ends=ends)
    assert "lyon with end; oslo with other" in broken(story)["equal weights at the end"]
    early = {tide: digests for tide, digests in told.adopted["lyon"].items() if tide < 2}
    sooner = msgspec.structs.replace(story, adopted={**told.adopted, "lyon": early})
    assert broken(sooner) == {}


def test_a_merge_that_cannot_be_repeated_is_told(told: SeaStory) -> None:
    gone = msgspec.structs.replace(told.repeated[1], outcome="no payload", digest="")
    story = msgspec.structs.replace(told, repeated=(told.repeated[0], gone))
    assert broken(story) == {"replay of the logbook": "tide 1 cannot be repeated: no payload"}


def test_another_sea_than_the_undisturbed_one_is_told(tmp_path: Path, told: SeaStory) -> None:
    other = WrittenSea(tmp_path / "other")
    other.publish("lyon")  # random numbers follow, others than in the first sea
    other.merge()
    reference = msgspec.structs.replace(told, records=records_of(other.store))
    assert (
        "merges, and 1 of the reference"
        in broken(told, reference=reference)["sea of the reference"]
    )
    ends = dict.fromkeys(ISLANDS, frozenset({"another"}))
    reference = msgspec.structs.replace(told, ends=ends)
    assert "end with different weights" in broken(told, reference=reference)["sea of the reference"]


def test_the_verdict_on_all_names_the_islands(told: SeaStory) -> None:
    one = HistoryVerdict(
        attempts=2,
        steps=5,
        executed=6,
        undone=1,
        undone_most=1,
        samples=10,
        checked=("samples once",),
        violations=(Violation(check="samples once", message="one twice"),),
    )
    found = together({"lyon": one, "oslo": one}, check_sea(told))
    assert (found.attempts, found.steps, found.undone, found.undone_most) == (4, 10, 2, 1)
    assert [each.message for each in found.violations] == ["lyon: one twice", "oslo: one twice"]
    assert found.names[: len(CHECKS)] == CHECKS
    assert set(found.names[len(CHECKS) :]) < set(SEA_CHECKS)
