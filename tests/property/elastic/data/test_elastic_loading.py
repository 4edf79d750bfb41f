"""Every sample comes once per epoch, in the same microbatches, over any history of worlds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_worlds import Numbers, Seen, StatefulStream, Stream, World, make_loader

from holdfast.ckpt.types import Json
from holdfast.elastic.data.loaders import Loader, LoaderContext
from holdfast.elastic.data.order import SampleOrder, Sequential, Shuffled, Weighted
from holdfast.elastic.data.plan import next_step, parts, steps_from
from holdfast.elastic.planning.shares import alongside, part

Make = Callable[[LoaderContext], Loader]

# One turn of a history: the ranks of a generation (times those abreast), how many steps it
# completes, whether it dies in the middle of another, how many steps the next generation goes
# back, and what cuts the shares.
turns = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.integers(0, 4),
        st.booleans(),
        st.integers(0, 3),
        st.randoms(use_true_random=False),
    ),
    min_size=1,
    max_size=5,
)


def cut(microbatches: int, size: int, how: Random) -> tuple[int, ...]:
    """Return any shares of so many ranks, one microbatch each at least; sometimes even ones."""
    if how.random() < 0.3:
        return ()
    ends = [0, *sorted(how.sample(range(1, microbatches), size - 1)), microbatches]
    return tuple(after - before for before, after in pairwise(ends))


def undisturbed(steps: int, *, microbatches: int, make: Make) -> list[Seen]:
    """Return what a world of one trains."""
    world = World(1, {}, microbatches=microbatches, make=make)
    return [world.step() for _ in range(steps)]


def disturbed(history: list[Any], *, microbatches: int, make: Make, abreast: int = 1) -> list[Seen]:
    """Return the trained samples, without rolled-back steps, over a history of worlds."""
    rounds = microbatches // abreast
    seen: list[Seen] = []
    saved: list[dict[str, Json]] = [{}]
    for ranks, steps, dies, back, how in history:
        size = min(ranks, rounds)
        world = World(
            size * abreast, saved[-1], microbatches=microbatches, make=make, abreast=abreast
        )
        for _ in range(steps):
            if how.random() < 0.5:
                world.look_ahead()
            if how.random() < 0.5:
                world.shares = alongside(cut(rounds, size, how), abreast)
            seen.append(world.step())
            saved.append(world.states)
        if dies:
            world.read_ahead()
        world.close()
        kept = max(0, len(seen) - back)
        del seen[kept:], saved[kept + 1 :]
    return seen


@given(
    size=st.integers(1, 30),
    rounds=st.integers(1, 6),
    abreast=st.integers(1, 3),
    more=st.integers(0, 8),
    history=turns,
    order=st.sampled_from([Sequential(), Shuffled()]),
)
@settings(max_examples=examples(50), deadline=None)
def test_no_history_of_worlds_shows_in_an_indexed_data_set(
    size: int, rounds: int, abreast: int, more: int, history: list[Any], order: SampleOrder
) -> None:
    microbatches = rounds * abreast

    def make(site: LoaderContext) -> Loader:
        return make_loader(Numbers(size), site, batch=microbatches + more, order=order)

    seen = disturbed(history, microbatches=microbatches, make=make, abreast=abreast)
    expected = undisturbed(len(seen), microbatches=microbatches, make=make)
    assert [(s.epoch, s.samples) for s in seen] == [(s.epoch, s.samples) for s in expected]
    assert all(step.weight == pytest.approx(microbatches) for step in seen)
    check_epochs(seen, size)


@pytest.mark.parametrize("kind", [Stream, StatefulStream])
@given(
    size=st.integers(1, 30),
    rounds=st.integers(1, 4),
    abreast=st.integers(1, 2),
    more=st.integers(0, 6),
    history=turns,
)
@settings(max_examples=examples(25), deadline=None)
def test_no_history_of_worlds_shows_in_an_iterable_data_set(
    kind: type[Stream], size: int, rounds: int, abreast: int, more: int, history: list[Any]
) -> None:
    microbatches = rounds * abreast

    def make(site: LoaderContext) -> Loader:
        return make_loader(kind(size), site, batch=microbatches + more)

    seen = disturbed(history, microbatches=microbatches, make=make, abreast=abreast)
    expected = undisturbed(len(seen), microbatches=microbatches, make=make)
    assert [(s.epoch, s.samples) for s in seen] == [(s.epoch, s.samples) for s in expected]
    assert all(step.weight == pytest.approx(microbatches) for step in seen)
    check_epochs(seen, size)


def check_epochs(seen: list[Seen], size: int) -> None:
    """Every complete epoch has each sample once, the present one none twice."""
    epochs: dict[int, Counter[int]] = {}
    for step in seen:
        count = epochs.setdefault(step.epoch, Counter())
        for samples in step.samples.values():
            count.update(samples)
    assert list(epochs) == list(range(len(epochs)))
    for epoch, count in epochs.items():
        assert set(count.values()) == {1}
        assert epoch == len(epochs) - 1 or set(count) == set(range(size))


@given(
    length=st.integers(1, 60),
    batch=st.integers(1, 20),
    rounds=st.integers(1, 10),
    groups=st.integers(1, 10),
    abreast=st.integers(1, 4),
)
@settings(deadline=None)
def test_the_weights_of_a_step_make_the_mean_over_its_samples(
    length: int, batch: int, rounds: int, groups: int, abreast: int
) -> None:
    microbatches, ranks = rounds * abreast, min(groups, rounds) * abreast
    for step in steps_from(epoch=0, offset=0, length=length, batch=batch):
        if step.epoch:
            break
        everyone = [
            parts(
                step,
                part(microbatches, rank=rank, ranks=ranks, abreast=abreast),
                microbatches=microbatches,
                abreast=abreast,
            )
            for rank in range(ranks)
        ]
        counts = [len(of_rank) for of_rank in everyone]
        assert all(len(set(counts[at : at + abreast])) == 1 for at in range(0, ranks, abreast))
        assert all(everyone), "a rank has nothing to run"
        real = [part for of_rank in everyone for part in of_rank if part.weight]
        visited = [position for part in real for position in part.positions]
        assert sorted(visited) == list(range(step.start, step.start + step.count))
        value = sum(p.weight * (sum(p.positions) / len(p.positions)) for p in real) / microbatches
        assert value == pytest.approx(sum(visited) / len(visited))


@given(length=st.integers(1, 50), batch=st.integers(1, 20), offset=st.integers(0, 60))
@settings(deadline=None)
def test_a_step_begins_where_the_last_ended_or_at_the_next_epoch(
    length: int, batch: int, offset: int
) -> None:
    step = next_step(epoch=3, offset=offset, length=length, batch=batch)
    assert (step.epoch, step.start) == ((3, offset) if offset < length else (4, 0))
    assert 1 <= step.count <= batch
    assert step.start + step.count <= length


weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(any)


@given(weights=weights, seed=st.integers(0, 99), epoch=st.integers(0, 9))
@settings(deadline=None)
def test_without_replacement_every_sample_with_weight_comes_once(
    weights: list[float], seed: int, epoch: int
) -> None:
    order = Weighted(weights, replacement=False)
    length = order.length(len(weights))
    drawn = order.indices(range(length), samples=len(weights), seed=seed, epoch=epoch)
    assert sorted(drawn) == [i for i, weight in enumerate(weights) if weight]


@given(weights=weights, seed=st.integers(0, 99), start=st.integers(0, 1000))
@settings(deadline=None)
def test_with_replacement_a_position_alone_says_what_is_drawn(
    weights: list[float], seed: int, start: int
) -> None:
    order = Weighted(weights, count=2000)
    together = order.indices(range(start, start + 9), samples=len(weights), seed=seed, epoch=1)
    single = [
        order.indices(range(p, p + 1), samples=len(weights), seed=seed, epoch=1)[0]
        for p in range(start, start + 9)
    ]
    assert together == single
    assert all(weights[index] > 0 for index in together)
