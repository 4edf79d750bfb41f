"""The loader of dealt samples: batches in the order of the hand, read ahead or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from torch.utils.data import DataLoader

from holdfast.ckpt.types import Json
from holdfast.elastic.data.dealt import DealtLoader
from holdfast.elastic.data.hand import Hand
from holdfast.elastic.data.loaders import LoaderContext
from holdfast.elastic.data.options import loading_of
from holdfast.elastic.errors import ConfigError, SeaError
from holdfast.elastic.islands.counters import IslandCounters
from holdfast.elastic.sea.records import DealtData

SAMPLES = 40


def as_list(samples: list[Any]) -> list[Any]:
    """Collate nothing."""
    return samples


class Island:
    """A rank that is alone, with the state that an island would keep."""

    def __init__(self, *, batch: int = 8, **options: Any) -> None:
        self.states: dict[str, Json] = {}
        self.counters = IslandCounters("a", portions=1)
        self.hand = Hand(lambda: self.counters.now)
        self.refills: list[tuple[int, int]] = []
        self.hand.refill = self._refill
        site = LoaderContext(
            seed=7,
            microbatches=4,
            abreast=1,
            states=lambda: self.states,
            mine=lambda: range(4),
            gather=lambda value: [value],
            check=lambda: None,
            beat=lambda: None,
            emit=lambda event: None,
        )
        loading = loading_of(
            list(range(SAMPLES)),
            size=2,
            shuffle=False,
            order=None,
            factory=DataLoader,
            options={"collate_fn": as_list, **options},
        )
        self.loader = DealtLoader(loading, site, name="data", batch=batch, hand=self.hand)

    def _refill(self) -> None:
        if self.hand.left < self.loader.batch and self.refills:
            self.hand.receive((self.refills.pop(0),))

    def step(self) -> list[int]:
        """Train a step; return its samples."""
        found = [sample for piece in self.loader.pieces() for sample in piece.fetch()]
        assert self.loader.drawn == len(found)
        self.loader.advance()
        return found


@pytest.fixture
def made() -> Iterator[Callable[..., Island]]:
    open_ones: list[Island] = []

    def make(**options: Any) -> Island:
        open_ones.append(Island(**options))
        return open_ones[-1]

    yield make
    for each in open_ones:
        with closing(each.loader):
            pass


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_follow_the_hand_also_where_it_ends_and_grows(
    made: Callable[..., Island], workers: int
) -> None:
    island = made(num_workers=workers)
    island.loader.reaches(3)
    island.hand.begin(((0, 12), (36, 44)))
    assert [island.step() for _ in range(2)] == [[*range(8)], [*range(8, 12), *range(36, 40)]]
    assert island.loader.epoch == 1
    island.hand.receive(((60, 62), (20, 26)))
    assert island.step() == [0, 1, 2, 3, 20, 21], "one epoch at a time"
    assert island.step() == [*range(20, 26)]
    island.refills = [(80, 90)]
    assert not island.loader.reaches(3)
    assert island.step() == [*range(8)]
    assert island.step() == [8, 9]
    assert island.loader.reaches(3)
    assert island.loader.epoch == 3


def test_a_new_lineage_drops_what_was_read_ahead(made: Callable[..., Island]) -> None:
    island = made(num_workers=1)
    island.hand.begin(((0, 40),))
    assert island.step() == [*range(8)]
    island.hand.begin(((16, 24),))
    assert island.step() == [*range(16, 24)]
    with pytest.raises(SeaError, match="no sample in hand"):
        island.step()


def test_a_restored_island_trains_the_same_samples_with_the_same_batch_only(
    made: Callable[..., Island],
) -> None:
    island = made()
    island.hand.begin(((3, 30),))
    island.step()
    saved, states = island.counters.state_dict(), dict(island.states)
    expected = [island.step(), island.step()]
    again = made()
    again.counters.load_state_dict(saved)
    again.states.update(states)
    again.hand.begin()
    assert [again.step(), again.step()] == expected
    other = made(batch=12)
    other.counters.load_state_dict(saved)
    other.states.update(states)
    other.hand.begin()
    with pytest.raises(ConfigError, match=r"saved with batch=8 .* now it has batch=12"):
        other.step()


def test_what_nobody_knows_before_is_refused_with_a_remedy(made: Callable[..., Island]) -> None:
    island = made()
    with pytest.raises(ConfigError, match=r"nobody knows their steps before; loop over run.epochs"):
        len(island.loader)
    with pytest.raises(ConfigError, match="begin with the first step"):
        island.loader.begin_at(3)
    with pytest.raises(ConfigError, match="make one loader of all"):
        island.hand.deal_from(DealtData(samples=1, order="x", seed=0), batch=1, ahead=0)
    assert not island.loader.reaches(2), "the sea is not entered yet"
    island.hand.begin(())
    with pytest.raises(ConfigError, match=r"run.epochs\(3, ...\): .* train 2 epochs"):
        island.loader.reaches(3)
    endless = made()
    endless.hand.begin(((0, 9),))
    with pytest.raises(ConfigError, match="train so many steps"):
        endless.loader.reaches(1)
    with pytest.raises(ConfigError, match=r"run\.microbatches"):
        _ = Hand(lambda: island.counters.now).data
