"""Loaders beside the run's and passes left early are refused by name; evaluations are not."""

from __future__ import annotations

import json
import sys

import pytest
from forked_scripts import ran
from tree import HELPERS


@pytest.fixture(scope="module")
def endings() -> dict[str, str]:
    done = ran([sys.executable, HELPERS / "own_loaders.py"])
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("loop", "at", "said"),
    [
        ("next_of_an_own_loader", "next(batches)", "inside microbatch 0 of step 0"),
        ("next_of_an_own_loader, stateful", "next(batches)", "inside microbatch 0 of step 0"),
        ("a_batch_for_each_step", "yield from loader", "in step 1"),
        ("a_batch_for_each_step, stateful", "yield from loader", "in step 1"),
        ("beside_the_microbatches", "zip(zip(loader", "inside microbatch 0 of step 0"),
        ("a_tracked_loader_by_hand", "next(own_batches)", "inside microbatch 0 of step 0"),
        ("around_the_microbatches", "zip(run.microbatches(), loader", "inside microbatch 0"),
    ],
)
def test_an_own_loader_is_refused_at_its_line(
    endings: dict[str, str], loop: str, at: str, said: str
) -> None:
    lines = (HELPERS / "own_loaders.py").read_text().splitlines()
    found = endings[loop]
    place = found.partition("is advanced at own_loaders.py:")[2].partition(" ")[0]
    assert at in lines[int(place) - 1], found
    assert said in found and "run.microbatches(loader)" in found


def test_an_evaluation_may_iterate_its_loader(endings: dict[str, str]) -> None:
    assert endings["an_evaluation_of_each_step"] == "completed"


@pytest.mark.parametrize("loop", ["the_first_microbatch_alone", "a_break"])
def test_a_pass_that_is_left_is_refused(endings: dict[str, str], loop: str) -> None:
    assert "was left at own_loaders.py:" in endings[loop]
    assert "iterate all of run.microbatches" in endings[loop]


@pytest.mark.parametrize("loop", ["one_that_is_held", "two_at_once"])
def test_a_pass_that_waits_is_refused(endings: dict[str, str], loop: str) -> None:
    assert "has not come to its end" in endings[loop]


def test_samples_divided_by_rank_are_refused(endings: dict[str, str]) -> None:
    assert "DistributedSampler divides the data set by rank" in endings["divided_by_rank"]


def test_a_tracked_generator_in_a_microbatch_is_refused(endings: dict[str, str]) -> None:
    assert "generator changed inside the pass over run.m" in endings["tracked_generator"]
    assert "run.generator('generator')" in endings["tracked_generator"]
