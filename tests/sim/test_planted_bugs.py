"""Each planted bug is found under its known seed, and without a bug the same seeds hold.

To search for all of them from seed 0 on: ``python -m pytest -m exhaustive
tests/sim/test_planted_bugs.py``.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
from mutants.__main__ import table
from mutants.bug import Bug, planted
from mutants.hunt import BUGS, hunt, try_once

BY_TRIAL = {
    trial: tuple(bugs)
    for trial, bugs in groupby(sorted(BUGS, key=lambda bug: bug.trial), key=lambda bug: bug.trial)
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_found_under_its_seed(bug: Bug) -> None:
    assert hunt(bug, seeds=[bug.seed]), f"{bug.name}: {bug.about}"


@pytest.mark.parametrize("trial", BY_TRIAL)
def test_without_a_bug_the_same_seeds_hold(trial: str) -> None:
    seeds = sorted({bug.seed for bug in BY_TRIAL[trial]})
    assert [how for seed in seeds if (how := try_once(trial, seed))] == []


def test_there_are_enough_of_them_and_each_is_gone_afterwards() -> None:
    assert len(BUGS) == len({bug.name for bug in BUGS}) >= 20
    bug = next(each for each in BUGS if each.name == "rolled-back-future")
    from holdfast.elastic.planning import plan

    real = plan.on_timeline
    with planted(bug):
        assert plan.on_timeline is not real
    assert plan.on_timeline is real


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_found_as_early_as_the_table_says(bug: Bug) -> None:
    found = hunt(bug, seeds=range(bug.seed + 1))
    assert found is not None
    assert (found.seed, found.tried) == (bug.seed, bug.after)


def test_table_of_the_guide_is_what_is_planted() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "chaos.md").read_text()
    assert "\n".join(table()) in guide
