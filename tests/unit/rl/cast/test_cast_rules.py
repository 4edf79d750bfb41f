"""Runs that train one policy each: versions, groups and steps are there when they are needed."""

from __future__ import annotations

import random

import pytest

from holdfast.adapters.rl.cast.rules import (
    admissible,
    behind,
    forgettable,
    kept_from,
    misfit,
    version_for,
)


def test_prompts_are_admitted_by_the_policy_that_is_behind_the_others() -> None:
    assert admissible(5, [5, 3], end=5, eta=2) == 3
    assert admissible(5, [9], end=5, eta=2) == 5, "the lead's own version counts too"
    assert admissible(0, [-1], end=0, eta=2) == -1, "nothing before every policy has a version"


def test_steps_that_are_in_the_log_need_no_version() -> None:
    assert admissible(2, [-1], end=9, eta=2) == 2
    assert admissible(8, [-1], end=9, eta=2) == 6, "the steps up to 8, which the log has"
    assert behind(8, {"critic": -1}, end=9, eta=2) == {}


def test_a_step_waits_for_the_version_that_samples_it() -> None:
    assert [version_for(step, eta=2) for step in range(5)] == [0, 0, 0, 1, 2]
    reached = {"critic": 0, "judge": 5}
    assert behind(2, reached, end=2, eta=2) == {}
    assert behind(3, reached, end=3, eta=2) == {"critic": 0}


def test_groups_stay_for_the_checkpoint_before_the_newest() -> None:
    assert kept_from(protected=9, durable=None, every=4) == 9
    assert kept_from(protected=9, durable=8, every=4) == 4
    assert kept_from(protected=9, durable=-1, every=4) == 0


def test_nothing_is_forgotten_before_all_runs_were_seen_and_the_newest_step_never() -> None:
    assert forgettable([7, 3, 5], end=8) == 3
    assert forgettable([7, None], end=8) == 0
    assert forgettable([8, 8], end=8) == 7
    assert forgettable([0], end=0) == 0


@pytest.mark.parametrize(
    ("completed", "reason"),
    [(3, "groups of the steps below 4 are gone"), (4, ""), (9, ""), (10, "only up to step 9")],
)
def test_a_run_begins_where_the_log_can_lead_it_on(completed: int, reason: str) -> None:
    found = misfit(completed, first=4, end=9)
    assert reason in found
    assert bool(found) == bool(reason)


class SimulatedRun:
    """A run at step ``completed``: its snapshots reach back ``eta`` steps."""

    def __init__(self, eta: int, *, every: int | None) -> None:
        self.completed = self.durable = 0
        self.eta, self.every = eta, every
        self.protected = self.told = 0

    def has(self, version: int) -> bool:
        return self.completed - self.eta <= version <= self.completed

    def train(self) -> None:
        self.completed += 1
        if self.every and self.completed % self.every == 0:
            self.durable = self.completed

    @property
    def keeps(self) -> int:
        durable = self.durable if self.every else None
        found = kept_from(protected=self.protected, durable=durable, every=self.every or 1)
        self.told = max(self.told, found)
        return found

    def fall_back(self, draw: random.Random) -> None:
        """Lose the newest steps; or all memory, and go on from a checkpoint."""
        if self.every and draw.random() < 0.5:
            before = max(self.told, self.durable - self.every)
            self.completed = draw.choice([self.durable, before])
            self.durable = self.completed
        else:
            self.completed = draw.randint(self.protected, self.completed)
        self.protected = self.completed


@pytest.mark.parametrize("seed", range(150))
def test_whoever_falls_back_all_come_to_the_end_and_need_nothing_that_is_gone(seed: int) -> None:
    draw = random.Random(f"cast {seed}")
    eta, every = draw.randint(0, 3), draw.choice([None, 1, 3])
    lead, *others = runs = [SimulatedRun(eta, every=every) for _ in range(draw.randint(2, 4))]
    first = end = 0
    turns, steps = 0, 25
    while any(run.completed < steps for run in runs):
        turns += 1
        assert turns < 5000, "nobody can go on"
        run = draw.choice(runs)
        if turns < 800 and draw.random() < 0.1:
            run.fall_back(draw)
            assert not misfit(run.completed, first=first, end=end)
        step = run.completed
        if run is lead and step == end < steps:
            reached = [each.completed for each in others]
            if admissible(step, reached, end=end, eta=eta) + eta < step:
                late = {str(number): each for number, each in enumerate(reached)}
                assert behind(step, late, end=end, eta=eta)
                continue
            needed = version_for(step, eta=eta)
            assert all(each.has(needed) for each in runs), (needed, [r.completed for r in runs])
            end += 1
            first = max(first, forgettable([each.keeps for each in runs], end=end))
        if first <= step < end:
            run.train()
            run.protected = draw.randint(max(run.protected, run.completed - 1), run.completed)
        else:
            assert step == end, "its groups are gone"
