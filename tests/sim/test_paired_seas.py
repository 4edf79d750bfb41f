"""Seas whose islands meet in pairs, on virtual time: production code, a store that fails.

A failure prints the seed; ``pytest tests/sim/test_paired_seas.py --sim-seed 7`` replays it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator

import pytest
from doubles.voyages import check_voyage, strike
from doubles.voyages import crews as crews_in_step

from holdfast.elastic.testing.seas.sea import Kind, SeaReport, sail

SEEDS = range(12)
MANY = range(400)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leaves and failures of the store are what these tests are about."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


crews = functools.partial(crews_in_step, topology="pairs")


@pytest.fixture(scope="module")
def calm() -> SeaReport:
    return sail(crews(4), (), seed=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_sea_keeps_its_promises(seed: int, request: pytest.FixtureRequest) -> None:
    replayed = request.config.getoption("--sim-seed", None)
    check_voyage(seed if replayed is None else replayed, pairs=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", MANY)
def test_many_drawn_seas_keep_their_promises(seed: int) -> None:
    check_voyage(1000 + seed, pairs=True)


def test_an_island_that_ends_and_goes_back_does_not_meet_itself() -> None:
    """Its works for the last merge are there already, before its record is."""
    check_voyage(176, pairs=True)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_islands_end_with_the_last_merge(count: int) -> None:
    found = sail(crews(count), (), seed=0)
    assert found.left == {"done": count}
    assert found.tides == 24 // 3 - 1


@pytest.mark.parametrize("kind", ["kill", "wipe", "notice", "freeze", "cut", "slow", "flaky"])
def test_a_fault_shorter_than_patience_changes_no_bit(kind: Kind, calm: SeaReport) -> None:
    found = sail(crews(4), strike(kind, 1, at_s=16, seconds=25), seed=1)
    assert (found.final, found.left) == (calm.final, calm.left)


def test_islands_killed_at_their_end_come_back_to_the_same_weights(calm: SeaReport) -> None:
    for number, at_s in enumerate((26.0, 28.0, 30.0, 32.0)):
        found = sail(crews(4), strike("wipe", 0, 1, 2, 3, at_s=at_s, seconds=5), seed=number)
        assert (found.final, found.left) == (calm.final, calm.left)


def test_a_silent_island_is_put_out_and_comes_back_with_its_work() -> None:
    found = sail(crews(3, steps=120), strike("freeze", 2, at_s=8, seconds=100), seed=4)
    assert found.left == {"silent": 1, "done": 3}


def test_an_island_that_lost_its_state_is_given_the_weights_of_another() -> None:
    found = sail(crews(3, steps=60), strike("lose", 0, at_s=20, seconds=10), seed=5)
    assert found.left == {"lost": 1, "done": 3}
    assert found.open == ()


def test_a_late_island_enters() -> None:
    some = crews(3, steps=60)
    islands = [dataclasses.replace(crew.islands, founders=2) for crew in some]
    early = [dataclasses.replace(c, islands=i) for c, i in zip(some, islands, strict=True)]
    early[2] = dataclasses.replace(early[2], after_s=25)
    assert sail(early, (), seed=6).left == {"done": 3}


def test_an_island_with_fewer_steps_waits_for_the_others_at_its_end() -> None:
    some = crews(3)
    some[0] = dataclasses.replace(some[0], steps=9)
    found = sail(some, (), seed=7)
    assert found.left == {"done": 3}
    assert found.tides == 24 // 3 - 1


def test_nothing_but_the_records_grows_with_the_tides() -> None:
    short, long = (sail(crews(3, steps=steps), (), seed=9) for steps in (90, 300))
    assert long.tides > 3 * short.tides
    assert long.files <= short.files * 1.25
