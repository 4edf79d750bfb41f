"""Draws in a microbatch: equal bits from the run's generators, a refusal from the script's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_generator_bodies import RIGHT, everything
from ranks import ranks
from tree import HELPERS

Found = dict[str, str]


def ran(world_size: int, folder: Path) -> list[Found]:
    with ranks(world_size, everything, folder) as running:
        found: list[Found] = running.results()
        return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Those of one rank alone, then of two."""
    return [*ran(1, tmp_path_factory.mktemp("one")), *ran(2, tmp_path_factory.mktemp("two"))]


def line_of(comment: str) -> int:
    lines = (HELPERS / "own_generator_bodies.py").read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"  # {comment}"))


@pytest.mark.parametrize(
    ("kind", "name", "remedy"),
    [
        ("torch", "OWN", "run.generator('OWN')"),
        ("numpy", "NUMPY", "numpy.random.default_rng(torch.initial_seed())"),
        ("python", "OFTEN", "random.Random(torch.initial_seed())"),
    ],
)
def test_a_generator_of_the_scripts_own_is_refused_alike_at_every_number_of_ranks(
    by_rank: list[Found], kind: str, name: str, remedy: str
) -> None:
    for found in by_rank:
        said = found[kind]
        used = f"used at own_generator_bodies.py:{line_of(kind)}"
        assert said.startswith(f"generator `{name}` of the script, {used}, was drawn from inside")
        assert remedy in said


def test_the_remedies_give_equal_bits_at_every_number_of_ranks(by_rank: list[Found]) -> None:
    alone, *others = by_rank
    for name in RIGHT:
        assert len(alone[name]) >= 32 and "generator" not in alone[name]
        assert {found[name] for found in others} == {alone[name]}
