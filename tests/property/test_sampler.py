"""Every sample once per epoch, every microbatch once per step, whatever the world."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.randomness import build_seed, microbatch_seed, step_seed
from elastic.sampler import Permutation, positions, sample_indices, share

seeds = st.integers(0, (1 << 63) - 1)


@given(size=st.integers(1, 300), seed=seeds, epoch=st.integers(0, 1000))
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed=seed, epoch=epoch)
    assert sorted(order[i] for i in range(size)) == list(range(size))


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = {
        tuple(Permutation(50, seed=seed, epoch=epoch)[i] for i in range(50))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


@given(
    samples=st.integers(1, 40),
    microbatches=st.integers(1, 6),
    size=st.integers(1, 5),
    steps=st.integers(1, 12),
    seed=seeds,
)
def test_the_microbatches_cover_epoch_after_epoch(
    samples: int, microbatches: int, size: int, steps: int, seed: int
) -> None:
    drawn = [
        index
        for step in range(steps)
        for microbatch in range(microbatches)
        for index in sample_indices(
            positions(step=step, microbatch=microbatch, microbatches=microbatches, size=size),
            samples=samples,
            seed=seed,
        )
    ]
    assert len(drawn) == steps * microbatches * size
    for start in range(0, len(drawn) - samples + 1, samples):
        assert sorted(drawn[start : start + samples]) == list(range(samples))


@given(microbatches=st.integers(1, 100), world_size=st.integers(1, 100))
def test_ranks_share_the_microbatches_without_gap_or_overlap(
    microbatches: int, world_size: int
) -> None:
    shares = [list(share(microbatches, rank=r, world_size=world_size)) for r in range(world_size)]
    assert [index for mine in shares for index in mine] == list(range(microbatches))
    sizes = {len(mine) for mine in shares}
    assert max(sizes) - min(sizes) <= 1


@given(seed=seeds)
def test_every_stream_has_its_own_seed(seed: int) -> None:
    streams = [microbatch_seed(seed, step=s, microbatch=m) for s in range(8) for m in range(8)]
    streams += [step_seed(seed, step=s, after_microbatches=a) for s in range(8) for a in (0, 1)]
    streams.append(build_seed(seed))
    assert len(set(streams)) == len(streams)
    assert all(0 <= stream < 1 << 63 for stream in streams)
