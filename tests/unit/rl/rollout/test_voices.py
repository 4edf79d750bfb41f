"""Replies name policies; a name that the job does not have ends it with a clear sentence."""

from __future__ import annotations

import pytest

from holdfast.adapters.rl.environments.base import Observation
from holdfast.adapters.rl.rollout.voices import next_speaker, rewards_of
from holdfast.ckpt.errors import ArgumentError
from holdfast.elastic.errors import JobFailedError

NAMES = ("solver", "critic")


def test_the_policy_that_spoke_goes_on_unless_another_is_named() -> None:
    assert next_speaker(Observation(text="x"), NAMES, before=1) == 1
    assert next_speaker(Observation(text="x", speaker="solver"), NAMES, before=1) == 0
    assert next_speaker(Observation(text="x"), ("",), before=0) == 0


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Observation(text="x"), (None, ())),
        (Observation(reward=2), (2.0, ())),
        (Observation(rewards={"solver": 1, "critic": -1}), (0.0, (1.0, -1.0))),
        (Observation(rewards={"critic": 3.0}, reward=1.0), (1.0, (1.0, 3.0))),
    ],
)
def test_an_episode_has_a_reward_and_one_for_each_policy_where_they_differ(
    reply: Observation, expected: tuple[float | None, tuple[float, ...]]
) -> None:
    assert rewards_of(reply, NAMES) == expected


def test_what_no_policy_is_called_is_refused() -> None:
    with pytest.raises(JobFailedError, match=r"speaker names policy 'judge': those of the job are"):
        next_speaker(Observation(text="x", speaker="judge"), NAMES, before=0)
    with pytest.raises(JobFailedError, match="speaker names policy 'judge': the job has a single"):
        next_speaker(Observation(text="x", speaker="judge"), ("",), before=0)
    with pytest.raises(JobFailedError, match="rewards names policy 'judge'"):
        rewards_of(Observation(rewards={"judge": 1.0}, reward=0.0), NAMES)
    with pytest.raises(JobFailedError, match=r"none to \['solver'\]: name all policies"):
        rewards_of(Observation(rewards={"critic": 1.0}), NAMES)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1"])
def test_a_reward_that_is_no_number_is_refused(reward: object) -> None:
    with pytest.raises(ArgumentError, match="solver gets"):
        Observation(rewards={"solver": reward})  # type: ignore[dict-item]
