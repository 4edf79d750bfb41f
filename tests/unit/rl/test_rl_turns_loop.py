"""Several policies in a user's own loop: deaths show in no token, and each policy has its book."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from own_loops import LIMITS, PLAN, Job

from holdfast.adapters.rl.environments.base import Observation
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.library import Episode, Rollouts, Sample, Trajectory
from holdfast.elastic.errors import ConfigError

NAMES = ("solver", "critic")
TURNS = msgspec.structs.replace(LIMITS, context=32, turns=True)
EPISODES = msgspec.structs.replace(PLAN, limits=TURNS)


def play(sample: Sample, *, most: int = 99) -> int:
    """Play an episode of three turns, for at most so many tokens and replies."""
    assert isinstance(sample, Episode)
    count = 0
    while not sample.finished and count < most:
        if not sample.turn_over:
            token = sample.draw(torch.zeros(10))
            sample.extend([token], [-0.1 * (token + 1)])
        elif sample.turn < 2:
            then = NAMES[(sample.turn + 1) % 2]
            sample.reply(Observation(speaker=then, state=list(sample.spoken)))
        else:
            sample.reply(Observation(rewards={"solver": 1.0, "critic": float(sample.sample)}))
        count += 1
    return count


def played(job: Job, rollouts: Rollouts) -> list[Trajectory]:
    for sample in rollouts.samples():
        play(sample)
    batch = rollouts.batch()
    job.completed = job.run.completed = job.run.completed + 1
    job.keep(rollouts)
    return batch


def plain(batch: list[Trajectory]) -> list[Any]:
    return [(each.key, each.tokens, each.logprobs, each.turns) for each in batch]


def test_each_policy_has_a_book_of_what_it_spoke() -> None:
    job = Job(EPISODES)
    rollouts = job.enter("p", policies=NAMES)
    batches = [played(job, rollouts) for _ in range(2)]
    spoken = {name: {"turns": 0, "tokens": 0} for name in NAMES}
    for done in (each for batch in batches for each in batch):
        for (start, end), number in zip(done.spans, done.speakers, strict=True):
            spoken[rollouts.policies[number]]["turns"] += 1
            spoken[rollouts.policies[number]]["tokens"] += end - start
        assert done.reward_of(1) == done.sample
    report: Any = rollouts.report()
    assert report["policies"] == spoken and report["violations"] == []
    assert spoken["critic"]["turns"] == 8


@pytest.mark.parametrize("most", range(1, 12))
def test_whoever_goes_on_after_a_death_makes_the_same_episodes(most: int) -> None:
    undisturbed = Job(EPISODES)
    expected = plain(played(undisturbed, undisturbed.enter("p", policies=NAMES)))
    job = Job(EPISODES)
    for sample in job.enter("p", policies=NAMES).samples():
        play(sample, most=most)  # and it is killed
        if sample.ordinal == 1:
            break
    second = job.enter("q", policies=NAMES)
    assert plain(played(job, second)) == expected
    report: Any = second.report()
    assert report["violations"] == [] and report["tokens_resampled"] == 0


def test_one_policy_may_have_several_turns() -> None:
    job = Job(EPISODES)
    rollouts = job.enter("p")
    for sample in rollouts.samples():
        assert isinstance(sample, Episode) and sample.speaker == ""
        while not sample.turn_over:
            sample.extend([1], [-1.0])
        sample.reply(Observation(reward=0.5))
    assert {each.reward for each in rollouts.batch()} == {0.5}
    assert "policies" not in rollouts.report()


@pytest.mark.parametrize(
    ("plan", "options", "says"),
    [
        (PLAN, {"policies": NAMES}, "give the plan TurnLimits"),
        (EPISODES, {"policies": ("a", "a")}, "give each a name of its own"),
        (EPISODES, {"policies": ("a", "")}, "give each a name of its own"),
        (
            msgspec.structs.replace(EPISODES, scheduling=Scheduling(skip_equal=4)),
            {"policies": NAMES, "reward_of": lambda done: 0.0},
            "may teach another",
        ),
    ],
)
def test_turns_and_policies_that_no_loop_has_are_refused(
    plan: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Job(plan).enter("p", **options)
