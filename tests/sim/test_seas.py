"""Seas of islands on virtual time: production couriers, arrivals and entrances, a store that fails.

A ledger of integers says which work is in the sea's weights: every step's, once. A failure prints
the seed; ``pytest tests/sim/test_seas.py --sim-seed 7`` replays it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import pytest
from doubles.voyages import check_voyage, crews, sailed, strike

from holdfast.elastic.sea.settings import Islands, Quorum
from holdfast.elastic.testing.seas.drawing import dealt, guarded, voyage
from holdfast.elastic.testing.seas.fleet import Fleet
from holdfast.elastic.testing.seas.sea import Kind, SeaReport, sail

SEEDS = range(24)
MANY = range(400)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leaves and failures of the store are what these tests are about."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def calm() -> SeaReport:
    return sail(crews(3), (), seed=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_sea_keeps_its_promises(seed: int, request: pytest.FixtureRequest) -> None:
    replayed = request.config.getoption("--sim-seed", None)
    check_voyage(seed if replayed is None else replayed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", MANY)
def test_many_drawn_seas_keep_their_promises(seed: int) -> None:
    check_voyage(1000 + seed)


def test_a_quiet_sea_merges_everything_and_all_leave(calm: SeaReport) -> None:
    assert calm.left == {"done": 3}
    assert calm.tides == 24 // 3 - 1 + 2
    assert calm.crashes == 0


@pytest.mark.parametrize("kind", ["kill", "wipe", "notice", "freeze", "cut", "slow", "flaky"])
def test_a_fault_shorter_than_patience_changes_no_bit(kind: Kind, calm: SeaReport) -> None:
    found = sail(crews(3), strike(kind, 1, at_s=16, seconds=25), seed=1)
    assert (found.final, found.left) == (calm.final, calm.left)


def test_a_node_with_a_notice_hands_over_and_waits_for_nobody(calm: SeaReport) -> None:
    """Another island is away for long: the one with the notice does not wait for its work."""
    away = strike("freeze", 0, at_s=8, seconds=50)
    for number, at_s in enumerate((9, 16, 22, 30, 40)):
        found = sail(crews(3), [*away, *strike("notice", 1, at_s=at_s)], seed=number)
        assert (found.final, found.left) == (calm.final, calm.left)
        (took_s,) = found.handed_over
        assert took_s < 5
    found = sail(crews(3), [*away, *(strike("notice", 1, at_s=s)[0] for s in (25, 35))], seed=9)
    assert (found.final, found.left) == (calm.final, calm.left)
    assert max(found.handed_over) < 5, "the next generation begins with the wait"
    assert len(found.handed_over) == 2


def test_all_islands_killed_at_once_come_back_to_the_same_weights(calm: SeaReport) -> None:
    found = sail(crews(3), strike("wipe", 0, 1, 2, at_s=12), seed=2)
    assert (found.final, found.left) == (calm.final, calm.left)


def test_nobody_is_put_out_while_the_store_is_gone(calm: SeaReport) -> None:
    """All are silent, but nobody could look; so no silence counts."""
    found = sail(crews(3), strike("cut", 0, 1, 2, seconds=54), seed=3)
    assert (found.final, found.left) == (calm.final, calm.left)


@pytest.mark.parametrize("kind", ["freeze", "cut", "kill"])
def test_a_silent_island_is_put_out_and_comes_back_with_its_work(kind: Kind) -> None:
    found = sail(crews(3, steps=120), strike(kind, 2, seconds=100), seed=4)
    assert found.left == {"silent": 1, "done": 3}


def test_an_island_that_lost_its_state_is_given_the_weights() -> None:
    found = sail(crews(3, steps=60), strike("lose", 0, at_s=20), seed=5)
    assert found.left == {"lost": 1, "done": 3}
    assert found.open == ()


def test_a_late_island_enters() -> None:
    late = dataclasses.replace(crews(3, steps=60)[2], after_s=25)
    early = [
        dataclasses.replace(each, islands=dataclasses.replace(each.islands, founders=2))
        for each in (*crews(3, steps=60)[:2], late)
    ]
    found = sail(early, (), seed=6)
    assert found.left == {"done": 3}


def test_an_island_that_asks_for_the_weights_is_not_silent() -> None:
    """Others that could answer are away; the one that asks is put out only after the patience."""
    check_voyage(1250)


@pytest.mark.parametrize("at_s", [25.1, 25.4, 25.8, 26.4, 27.0])
def test_what_an_island_asked_for_that_is_gone_is_removed(at_s: float) -> None:
    late = dataclasses.replace(crews(3)[2], after_s=25)
    early = [
        dataclasses.replace(
            each, islands=dataclasses.replace(each.islands, founders=2, patience_s=10)
        )
        for each in (*crews(3, steps=240)[:2], late)
    ]
    found = sail(early, strike("vanish", 2, at_s=at_s), seed=6)
    assert found.open == ()
    assert found.left["done"] == 2


def test_with_a_quorum_a_silent_island_stops_nobody() -> None:
    quorum = crews(4, steps=60, wait=Quorum(0.6, grace_s=1))
    calm_s = sail(quorum, (), seed=7).seconds
    found = sail(quorum, strike("freeze", 3, seconds=40), seed=7)
    assert found.left == {"done": 4}
    assert found.seconds < calm_s + 45


def test_a_slow_island_takes_fewer_steps_so_that_nobody_waits_for_it() -> None:
    def of(least_every: int | None) -> SeaReport:
        some = [
            dataclasses.replace(
                crew,
                islands=dataclasses.replace(crew.islands, every=16, least_every=least_every),
                seconds=seconds,
                steps=round(160 / seconds),
            )
            for crew, seconds in zip(crews(3), (1.0, 1.0, 4.0), strict=True)
        ]
        return sail(some, (), seed=3)

    alike, by_speed = of(None), of(4)
    assert alike.left == by_speed.left == {"done": 3}
    assert by_speed.tides > alike.tides - 3
    assert by_speed.seconds < 0.75 * alike.seconds


def test_damaged_weights_stop_their_island_and_not_the_sea() -> None:
    found = sail(crews(3, steps=60), strike("damage", 1, at_s=10), seed=8)
    assert found.left == {"astray": 1, "done": 3}


def test_nothing_grows_with_the_tides() -> None:
    short, long = (sail(crews(2, steps=steps), (), seed=9) for steps in (90, 300))
    assert long.tides > 3 * short.tides
    assert long.files <= short.files * 1.25


@pytest.mark.parametrize("wait", ["all", Quorum(0.8, grace_s=1)], ids=["all", "quorum"])
@pytest.mark.parametrize(("count", "tides"), [(4, 60), (64, 12), (512, 4)])
def test_many_islands_agree_on_one_chain(count: int, tides: int, wait: object) -> None:
    many(count, tides, wait)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wait", ["all", Quorum(0.8, grace_s=1)], ids=["all", "quorum"])
@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_islands_agree_on_one_chain(seed: int, wait: object) -> None:
    many(4096, 4, wait, seed=seed)


def many(count: int, tides: int, wait: object, *, seed: int = 1) -> None:
    islands = Islands(every=4, portions=2, overlap=1, patience_s=90, wait=wait)  # type: ignore[arg-type]
    fleet = Fleet(islands, count, tides=tides, seed=seed)
    fleet.sail()
    assert fleet.view.tide == tides
    assert fleet.view.length == sum(fleet.records.values())
    assert fleet.lost or count > 64, "no two islands decided at once"


def check_dealt(seed: int) -> None:
    """Run the voyage of a seed with samples that the logbook deals; the oracle counts each once."""
    drawn = dealt(voyage(seed), seed)
    found = sailed(drawn, seed)
    if drawn.is_alike and found.left.keys() == {"done"}:
        assert found.final == sail(drawn.crews, (), seed=seed).final, f"seed {seed}"


@pytest.mark.parametrize("seed", range(8))
def test_every_sample_that_a_drawn_sea_deals_is_in_it_once(
    seed: int, request: pytest.FixtureRequest
) -> None:
    replayed = request.config.getoption("--sim-seed", None)
    check_dealt(seed if replayed is None else replayed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", MANY)
def test_every_sample_that_many_drawn_seas_deal_is_in_them_once(seed: int) -> None:
    check_dealt(1000 + seed)


def check_guarded(seed: int, *, pairs: bool = False, deals: bool = False) -> None:
    """Run the voyage of a seed with faults that loss guards undo; the sea gets none of them.

    With ``deals`` the logbook deals the samples; the oracle counts each once.
    """
    drawn = voyage(seed, pairs=pairs)
    drawn = guarded(dealt(drawn, seed) if deals else drawn, seed)
    found = sailed(drawn, seed)
    if drawn.is_alike and found.left.keys() == {"done"}:
        assert found.final == sail(drawn.crews, (), seed=seed).final, f"seed {seed}"


@pytest.mark.parametrize("at_s", [3.0, 6.5, 11.0, 15.5, 19.0])
def test_a_fault_that_a_loss_guard_undoes_changes_no_bit(at_s: float, calm: SeaReport) -> None:
    for number in range(3):
        some = crews(3, steps_back=1)
        found = sail(some, strike("spoil", 0, 2, at_s=at_s), seed=number)
        assert (found.final, found.left) == (calm.final, calm.left)


@pytest.mark.parametrize("seed", range(8))
def test_islands_of_a_drawn_sea_go_back_and_own_work_is_merged_once(
    seed: int, request: pytest.FixtureRequest
) -> None:
    replayed = request.config.getoption("--sim-seed", None)
    check_guarded(seed if replayed is None else replayed, pairs=seed % 4 == 3)


@pytest.mark.parametrize("seed", range(3))
def test_islands_that_go_back_train_the_samples_that_they_were_dealt_once(seed: int) -> None:
    check_guarded(seed, deals=True)


def test_with_a_quorum_an_island_trains_again_before_it_adopts_what_it_sent() -> None:
    """It has gone back to before samples that are in the sea.

    Its next work must not have fewer than they: no merge would take it. It needs dealt samples, a
    quorum, and an old state.
    """
    check_guarded(1051, deals=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pairs", [False, True], ids=["all", "pairs"])
@pytest.mark.parametrize("seed", MANY)
def test_islands_of_many_drawn_seas_go_back(seed: int, pairs: bool) -> None:
    check_guarded(1000 + seed, pairs=pairs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100))
def test_islands_of_many_drawn_seas_go_back_with_dealt_samples(seed: int) -> None:
    check_guarded(1000 + seed, deals=True)
