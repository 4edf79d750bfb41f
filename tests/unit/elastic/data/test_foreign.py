"""A DataLoader beside the run's is noticed where a restore or a share would show in its samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from holdfast.elastic.data.foreign import ForeignLoaders, Moment
from holdfast.elastic.errors import ConfigError

STATEFUL = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
DATA = [torch.tensor(i) for i in range(12)]


class Place:
    """The place that a test says, with the line of the code that runs."""

    def __init__(self) -> None:
        self.moment, self.line = Moment(), "train.py:1"
        self.own = False

    def __call__(self) -> Moment:
        return self.moment


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    loaders = ForeignLoaders(moment=found, line=lambda: None if found.own else found.line)
    with loaders.watched():
        yield found


@pytest.fixture(params=[DataLoader, STATEFUL])
def loader(request: pytest.FixtureRequest) -> Any:
    return request.param(DATA, batch_size=4)


def test_an_iterator_that_is_carried_into_a_microbatch_is_refused(
    place: Place, loader: Any
) -> None:
    place.line = "train.py:3"
    iterator = iter(loader)
    place.moment, place.line = Moment(step=0, microbatch=2, visit=1), "train.py:7"
    said = (
        r"made at train\.py:3 \(outside of the steps\) is advanced at train\.py:7 "
        r"\(inside microbatch 2 of step 0\).*run\.loader\(dataset\)"
    )
    with pytest.raises(ConfigError, match=said):
        next(iterator)


def test_one_that_is_carried_from_step_to_step_is_refused(place: Place, loader: Any) -> None:
    place.moment = Moment(step=3)
    iterator = iter(loader)
    next(iterator)
    place.moment = Moment(step=4)
    with pytest.raises(ConfigError, match=r"\(in step 3\) is advanced .* \(in step 4\)"):
        next(iterator)


def test_one_made_before_anybody_watched_is_refused_in_a_step(loader: Any) -> None:
    iterator = iter(loader)
    place = Place()
    place.moment = Moment(step=1)
    watched = ForeignLoaders(moment=place, line=lambda: "train.py:9").watched()
    with watched, pytest.raises(ConfigError, match=r"made at an earlier line .* train\.py:9"):
        next(iterator)


@pytest.mark.parametrize(
    "moment", [Moment(), Moment(step=2), Moment(step=2, microbatch=0, visit=9)]
)
def test_one_that_is_read_in_one_place_is_not(place: Place, loader: Any, moment: Moment) -> None:
    place.moment = moment
    assert [len(batch) for batch in loader] == [4, 4, 4]


def test_the_same_microbatch_of_another_pass_is_another_place(place: Place, loader: Any) -> None:
    place.moment = Moment(step=2, microbatch=0, visit=9)
    iterator = iter(loader)
    place.moment = Moment(step=2, microbatch=0, visit=14)
    with pytest.raises(ConfigError, match="inside microbatch 0"):
        next(iterator)


def test_persistent_workers_begin_anew_in_every_step(place: Place) -> None:
    loader = DataLoader(DATA, batch_size=6, num_workers=1, persistent_workers=True)
    for step in range(2):
        place.moment = Moment(step=step)
        assert len(list(loader)) == 2


def test_the_runs_own_iterators_go_on(place: Place, loader: Any) -> None:
    place.own = True
    iterator = iter(loader)
    place.moment = Moment(step=1)
    assert len(next(iterator)) == 4


def test_torch_is_itself_again_afterwards() -> None:
    kind: Any = type(iter(DataLoader(DATA)))
    before = kind.__next__
    with ForeignLoaders(moment=Moment, line=lambda: "").watched():
        assert kind.__next__ is not before
    assert kind.__next__ is before
