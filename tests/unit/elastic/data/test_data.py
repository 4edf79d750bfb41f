"""A loader's accepted data, refusals, and batches."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from loader_worlds import Numbers, StatefulStream, Stream, alone, as_list, make_loader
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.ckpt.types import Json
from holdfast.elastic.data.loaders import Loader
from holdfast.elastic.data.options import Loading, loading_of
from holdfast.elastic.data.order import Sequential, Shuffled, Weighted, logarithm
from holdfast.elastic.data.samples import SampleRequest, SeededSamples
from holdfast.elastic.data.streams import Shard, ShardPlan
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.gradients.metrics import Metrics


def read_off(dataset: Any, **how: Any) -> Loading:
    more: dict[str, Any] = {"size": 1, "shuffle": None, "order": None, "factory": DataLoader}
    options = how.pop("options", {})
    return loading_of(dataset, **{**more, **how}, options=options)


def steps_of(loader: Loader, count: int) -> list[list[Any]]:
    found = []
    for _ in range(count):
        found.append([sample for piece in loader.pieces() for sample in piece.fetch()])
        loader.advance()
    return found


def test_the_last_step_of_an_epoch_has_what_is_left() -> None:
    loader = make_loader(Numbers(10), alone({}, 2), batch=4, order=Sequential())
    assert len(loader) == 3  # type: ignore[arg-type]
    assert steps_of(loader, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    assert loader.epoch == 1


def test_a_complete_epoch_is_told_from_one_that_goes_on() -> None:
    loader = make_loader(Numbers(8), alone({}, 2), batch=4)
    assert not loader.reaches(1)
    steps_of(loader, 1)
    assert (loader.epoch, loader.reaches(1)) == (0, False)
    steps_of(loader, 1)
    assert (loader.epoch, loader.reaches(1)) == (1, True)


@pytest.mark.parametrize("dataset", [Numbers(9), Stream(9), StatefulStream(9)])
def test_a_step_that_is_not_complete_is_read_again(dataset: Any) -> None:
    states: dict[str, Json] = {}
    first = make_loader(dataset, alone(states, 2), batch=4)
    steps_of(first, 1)
    again = [sample for piece in first.pieces() for sample in piece.fetch()]
    after = make_loader(dataset, alone(states, 2), batch=4)
    assert steps_of(after, 1) == [again]


def test_a_batch_changed_in_place_is_whole_in_another_pass_of_the_step() -> None:
    loader = make_loader(
        Numbers(4), alone({}, 1), batch=4, order=Sequential(), collate_fn=torch.tensor
    )
    for _ in range(2):
        (piece,) = loader.pieces()
        batch = piece.fetch()
        assert batch.tolist() == [0, 1, 2, 3]
        batch.zero_()


def test_a_loop_that_was_left_early_goes_on_with_the_next_step() -> None:
    loader = make_loader(Numbers(12), alone({}, 3), batch=6, order=Sequential())
    assert loader.pieces()[0].fetch() == [0, 1]
    loader.advance()
    assert steps_of(loader, 1) == [[6, 7, 8, 9, 10, 11]]


def test_shares_may_change_between_steps() -> None:
    mine: list[Any] = [range(3)]
    site = alone({}, 3, mine=lambda: mine[0])
    loader = make_loader(Numbers(12), site, batch=6, order=Sequential())
    assert steps_of(loader, 1) == [[0, 1, 2, 3, 4, 5]]
    mine[0] = range(1, 2)
    assert steps_of(loader, 1) == [[8, 9]]


def test_another_data_set_under_the_same_name_is_refused() -> None:
    states: dict[str, Json] = {}
    steps_of(make_loader(Numbers(9), alone(states, 2), batch=4), 1)
    with pytest.raises(ConfigError, match=r"saved with 9 samples .* now it has 10"):
        make_loader(Numbers(10), alone(states, 2), batch=4).pieces()
    with pytest.raises(ConfigError, match="not one of this kind"):
        make_loader(Stream(9), alone(states, 2), batch=4).pieces()
    with pytest.raises(ConfigError, match="in the order shuffled"):
        make_loader(Numbers(9), alone(states, 2), batch=4, order=Sequential()).pieces()


def test_another_batch_continues_an_indexed_data_set_and_no_iterable_one() -> None:
    states: dict[str, Json] = {}
    steps_of(make_loader(Numbers(9), alone(states, 2), batch=4, order=Sequential()), 1)
    found = steps_of(make_loader(Numbers(9), alone(states, 2), batch=3, order=Sequential()), 1)
    assert found == [[4, 5, 6]]
    states.clear()
    steps_of(make_loader(Stream(9), alone(states, 2), batch=4), 1)
    with pytest.raises(ConfigError, match="batch=4, now 3"):
        make_loader(Stream(9), alone(states, 2), batch=3).pieces()


@pytest.mark.parametrize(
    ("dataset", "how", "named"),
    [
        (Numbers(9), {"options": {"drop_last": True}}, "nothing is dropped"),
        (Numbers(9), {"options": {"batch_size": 3}}, "batch="),
        (Numbers(9), {"shuffle": True, "order": Sequential()}, "both say the order"),
        (Stream(9), {"shuffle": True}, "order of its own"),
        (DataLoader(Numbers(9)), {"options": {"num_workers": 1}}, "num_workers"),
        (DataLoader(Numbers(9), batch_size=None), {}, "needs a batch_size"),
    ],
)
def test_what_contradicts_itself_is_refused(dataset: Any, how: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_off(dataset, **how)


def test_batches_too_small_and_data_sets_without_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 4 samples"):
        make_loader(Numbers(9), alone({}, 4), batch=3)
    with pytest.raises(ConfigError, match="is empty"):
        make_loader(Numbers(0), alone({}, 4), batch=4)
    with pytest.raises(ConfigError, match="gives no samples"):
        make_loader(Stream(0), alone({}, 4), batch=4).pieces()


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_dataloader_is_taken_over_with_its_order(kind: Any) -> None:
    data = Numbers(9)
    for given, expected in (
        ({}, "sequential"),
        ({"shuffle": True}, "shuffled"),
        ({"sampler": RandomSampler(data)}, "shuffled"),  # type: ignore[arg-type]
        ({"sampler": SequentialSampler(data)}, "sequential"),
    ):
        loading = read_off(kind(data, batch_size=3, num_workers=2, collate_fn=as_list, **given))
        assert loading.order is not None
        assert loading.order.describe() == expected
        assert (loading.factory, loading.size, loading.workers) == (kind, 3, 2)
        assert (loading.dataset, loading.collate) == (data, as_list)


def test_weighted_and_drawn_samplers_are_taken_over() -> None:
    weights = [1.0, 0.0, 2.0]
    for sampler, kind in (
        (WeightedRandomSampler(weights, 5), ["weighted", True, 5]),
        (WeightedRandomSampler(weights, 2, replacement=False), ["weighted", False, 2]),
        (RandomSampler(Numbers(3), replacement=True, num_samples=7), ["weighted", True, 7]),  # type: ignore[arg-type]
    ):
        order = read_off(DataLoader(Numbers(3), sampler=sampler)).order  # type: ignore[arg-type]
        assert order is not None
        described = order.describe()
        assert isinstance(described, list)
        assert described[:3] == kind


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"weights": []}, "one weight for each"),
        ({"weights": [1.0, -1.0]}, "0 or more"),
        ({"weights": [1.0, float("nan")]}, "finite"),
        ({"weights": [0.0]}, "nothing can be drawn"),
        ({"weights": [1.0, 0.0], "count": 2, "replacement": False}, "at most the 1 samples"),
        ({"weights": ["heavy"]}, "give one number each"),
        ({"weights": 3}, "give one number each"),
        ({"weights": [[1.0], [2.0]]}, "has 2 dimensions: give one number for each sample"),
        ({"weights": [1.0], "count": 0}, r"Weighted\(count=0\): give 1 or more samples"),
        ({"weights": [1.0], "count": 1.5}, r"Weighted\(count=1.5\)"),
        ({"weights": [1.0], "replacement": "no"}, r"replacement='no'\): give True or False"),
    ],
)
def test_weights_that_say_nothing_are_refused(how: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Weighted(**how)


def test_weights_are_one_for_each_sample() -> None:
    with pytest.raises(ConfigError, match="2 weights for 3 samples"):
        make_loader(Numbers(3), alone({}, 1), batch=1, order=Weighted([1.0, 2.0]))


def test_samples_are_drawn_as_often_as_their_weight_says() -> None:
    order = Weighted([1, 0, 3], count=8000)
    drawn = order.indices(range(8000), samples=3, seed=1, epoch=0)
    assert drawn.count(1) == 0
    assert drawn.count(2) == pytest.approx(6000, abs=200)
    firsts = [
        Weighted([1, 0, 3], replacement=False).indices(range(1), samples=3, seed=s, epoch=0)[0]
        for s in range(2000)
    ]
    assert firsts.count(2) == pytest.approx(1500, abs=100)


def test_the_logarithm_is_right_to_the_last_bits() -> None:
    values = torch.rand(1000, dtype=torch.float64).clamp(min=2.0**-53).numpy()
    assert logarithm(values) == pytest.approx(torch.from_numpy(values).log().numpy(), abs=1e-14)


def test_a_sample_has_the_same_randomness_in_every_batch_and_another_in_every_epoch() -> None:
    class Noise(Numbers):
        def __getitem__(self, index: int) -> Any:
            return index, random.random(), torch.rand(()).item()

    samples = SeededSamples(Noise(9), seed=3)
    first = samples.__getitems__(SampleRequest(epoch=0, indices=(4, 7)))
    assert samples.__getitems__(SampleRequest(epoch=0, indices=(7,))) == first[1:]
    assert samples.__getitems__(SampleRequest(epoch=1, indices=(7,))) != first[1:]


def test_a_data_set_that_reads_batches_is_asked_for_batches() -> None:
    requests: list[Any] = []

    class Batched(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            requests.append(indices)
            return indices

    loader = make_loader(Batched(6), alone({}, 2), batch=4, order=Sequential())
    assert steps_of(loader, 1) == [[0, 1, 2, 3]]
    assert requests == [[0, 1], [2, 3]]


def test_a_shard_returns_to_its_state_with_what_its_data_set_drew_at_random() -> None:
    class Shaken(Stream):
        def __iter__(self) -> Any:
            for number in super().__iter__():
                yield number, random.random()

    for kind in (Shaken, type("Placed", (Shaken, StatefulStream), {})):
        plan = ShardPlan(seed=1, epoch=2, sizes=(2, 3))
        shard = Shard(kind(11), 1, plan=plan)
        shard.draw()
        saved, rest = shard.state(), [shard.draw(), shard.draw()]
        again = Shard(kind(11), 1, plan=plan, state=saved)
        assert [again.draw(), again.draw()] == rest
        ended = shard.state()
        assert Shard(kind(11), 1, plan=plan, state=ended).draw() == []


def test_a_data_set_that_cannot_be_copied_is_named() -> None:
    stream = Stream(3)
    stream.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="Stream cannot be copied"):
        Shard(stream, 0, plan=ShardPlan(seed=1, epoch=0, sizes=(1,)))


def test_shuffled_is_what_an_indexed_data_set_gets_unless_told() -> None:
    assert isinstance(read_off(Numbers(3)).order, Shuffled)
    assert isinstance(read_off(Numbers(3), shuffle=False).order, Sequential)
    assert read_off(Stream(3)).order is None
    subset: Any = Subset(Numbers(9), [1, 2])  # type: ignore[arg-type]
    assert isinstance(read_off(subset, options={"persistent_workers": True}).order, Shuffled)


class _NoReduction:
    def sum_(self, tensor: torch.Tensor) -> None: ...
    def max_(self, tensor: torch.Tensor) -> None: ...


def test_logged_values_count_by_their_samples_and_stand_ins_not_at_all() -> None:
    logs = Metrics(3)
    logs.add(0, {"loss": 1.0}, counts=2)
    logs.add(1, {"loss": 4.0}, counts=1)
    logs.add(2, {"loss": 99.0}, counts=0)
    logs.end_pass(_NoReduction())
    assert logs.latest == {"loss": 2.0}


def test_a_loader_begins_at_any_step_with_the_samples_after_it() -> None:
    whole = steps_of(make_loader(Numbers(10), alone({}, 2), batch=4), 7)
    for step in range(7):
        later = make_loader(Numbers(10), alone({}, 2), batch=4)
        later.begin_at(step)
        assert steps_of(later, 7 - step) == whole[step:]
    with pytest.raises(ConfigError, match="cannot begin at step 3: its data set is iterable"):
        make_loader(Stream(9), alone({}, 2), batch=4).begin_at(3)
