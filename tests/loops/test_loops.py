"""Loops as they are found in public: a port has the losses of its plain twin, and equal bits
whatever happens to its ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalogue import LOOPS, Loop
from cluster import Cluster, Kill, Outcome, cluster, state_of

BEAT = 3
"""The first sign of life in a step at which a rank has trained on a microbatch."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    with cluster(*(loop.path for loop in LOOPS)) as found:
        yield found


def good(outcome: Outcome) -> Outcome:
    assert not outcome.error, outcome.error
    return outcome


@pytest.fixture(scope="module")
def alone(ranks: Cluster, tmp_path_factory: pytest.TempPathFactory) -> object:
    """Return a function that trains a loop undisturbed, once for all tests that ask.

    On one rank, or if the result depends on their number, on as many as are ``compared``.
    """
    known: dict[tuple[str, int], tuple[Outcome, dict[str, str]]] = {}

    def trained(loop: Loop, compared: int = 1) -> tuple[Outcome, dict[str, str]]:
        key = loop.name, compared if loop.is_per_rank else 1
        if key not in known:
            folder = tmp_path_factory.mktemp(loop.name)
            outcome = good(ranks.run(loop.path, folder, size=key[1]))
            known[key] = outcome, state_of(folder)
        return known[key]

    return trained


def cases(*, third: int | None = None) -> list[object]:
    """Return all loops; those that are not of this third are left to the exhaustive tests."""
    rest = pytest.mark.exhaustive
    return [
        pytest.param(loop, id=loop.name, marks=() if third in (None, at % 3) else rest)
        for at, loop in enumerate(LOOPS)
    ]


@pytest.mark.parametrize("loop", cases())
def test_the_losses_are_those_of_the_plain_twin(loop: Loop, alone) -> None:  # type: ignore[no-untyped-def]
    outcome, _ = alone(loop)
    loop.has_losses(outcome.losses)


@pytest.mark.parametrize("loop", cases(third=2))
def test_three_ranks_end_with_the_bits_of_one_or_of_three_if_these_have_own_state(
    loop: Loop,
    ranks: Cluster,
    alone,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    good(ranks.run(loop.path, tmp_path, size=3))
    assert state_of(tmp_path) == alone(loop, 3)[1]


@pytest.mark.parametrize("loop", cases(third=0))
def test_a_killed_rank_is_replaced_and_leaves_no_trace(
    loop: Loop,
    ranks: Cluster,
    alone,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    kill = Kill(step=3, beat=BEAT + zlib.crc32(loop.name.encode()) % 3)
    outcome = good(ranks.run(loop.path, tmp_path, size=2, kill=kill))
    assert outcome.restored[1] != "none"
    assert state_of(tmp_path) == alone(loop, 2)[1]


@pytest.mark.parametrize("loop", cases(third=1))
def test_a_run_begun_again_from_its_checkpoint_leaves_no_trace(
    loop: Loop,
    ranks: Cluster,
    alone,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    kill = Kill(step=3, beat=BEAT, everyone=True)
    good(ranks.run(loop.path, tmp_path, size=2, every=2, kill=kill))
    size = 2 if loop.is_per_rank else 3
    outcome = good(ranks.run(loop.path, tmp_path, size=size))
    assert outcome.restored[0] == "checkpoint"
    assert state_of(tmp_path) == alone(loop, 2)[1]
