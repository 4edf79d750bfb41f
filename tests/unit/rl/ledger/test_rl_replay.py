"""Groups that are trained on again, one sentence each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.ledger.replay import Replay, ReplayConfig
from holdfast.adapters.rl.loss.ppo import LossConfig
from holdfast.adapters.rl.samples.trajectory import Trajectory

REWARDS = {0: [0.0, 1.0], 1: [0.5, 0.5], 2: [0.2, 0.8], 3: [0.0, 0.9]}


def replay_of(count: int = 1, **fields: Any) -> Replay:
    return Replay(ReplayConfig(**fields), count=count)


def train(replay: Replay, step: int, *ordinals: int) -> None:
    groups = {
        ordinal: [
            Trajectory(ordinal=ordinal, sample=sample, prompt=(97,), tokens=(), logprobs=())
            for sample in range(2)
        ]
        for ordinal in ordinals
    }
    replay.train(step, groups, REWARDS)
    assert replay.check(step + 1) == []


def test_without_replay_nothing_is_kept() -> None:
    replay = replay_of(count=0)
    train(replay, 0, 0, 1)
    assert (replay.choose(1), replay.uses) == ([], {})
    assert ReplayConfig().reused(8) == 0


def test_the_most_recent_are_taken_again() -> None:
    replay = replay_of(2, policy="recent")
    train(replay, 0, 0, 1)
    assert replay.choose(1) == [0, 1]
    train(replay, 1, 2)
    assert replay.choose(2) == [2, 0]
    train(replay, 2)
    assert replay.choose(3) == [2, 1], "of those equally recent the least used"
    assert replay.uses == {2: 2, 3: 1}


def test_those_that_teach_most_are_taken_again_and_less_the_more_often_they_were() -> None:
    replay = replay_of(1, policy="prioritized")
    train(replay, 0, 0, 1, 2)
    assert replay.choose(1) == [0]
    train(replay, 1, 3)
    assert replay.choose(2) == [3]
    train(replay, 2)
    assert replay.choose(3) == [2]
    assert 1 not in replay_choices(replay), "its rewards are all equal"


def replay_choices(replay: Replay) -> set[int]:
    chosen = set[int]()
    for step in range(3, 5):
        chosen |= set(replay.choose(step))
        train(replay, step)
    return chosen


def test_what_is_too_old_or_too_much_is_let_go_and_stays_counted() -> None:
    replay = replay_of(1, policy="prioritized", max_age=2, capacity=2)
    train(replay, 0, 0, 1, 2)
    assert replay.choose(1) == [0]
    train(replay, 1)
    train(replay, 2)
    assert replay.choose(3) == []
    assert replay.uses == {1: 1, 2: 2}


def test_a_restored_one_chooses_the_same() -> None:
    replay = replay_of(2, policy="prioritized")
    train(replay, 0, 0, 2)
    train(replay, 1, 3)
    again = replay_of(2, policy="prioritized")
    again.load_state_dict(json.loads(json.dumps(replay.state_dict())))
    assert again.choose(2) == replay.choose(2)
    assert again.samples(3) == replay.samples(3)
    assert again.uses == replay.uses


def test_snapshots_of_reused_groups_are_kept_where_their_policies_are_computed_again() -> None:
    replay = ReplayConfig(policy="recent", max_age=3)
    assert RLConfig(replay=replay).keep == 3
    assert RLConfig(replay=replay, loss=LossConfig(proximal="recomputed")).keep == 6


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.0}, {"max_age": 0}, {"capacity": 0}])
def test_wrong_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ReplayConfig(**wrong)
