"""Episodes of a user's own loop: turns, who speaks, replies, and what comes too early or late."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.adapters.rl.engines.streams import PoolWork
from holdfast.adapters.rl.environments.base import Action, Observation
from holdfast.adapters.rl.rollout.episode import Episode
from holdfast.adapters.rl.samples.sample import Sample, SampleSink
from holdfast.adapters.rl.samples.token_record import decode_deltas, encode_deltas
from holdfast.adapters.rl.samples.trajectory import Delta, Trajectory, TurnLimits
from holdfast.elastic.errors import ConfigError, JobFailedError

LIMITS = TurnLimits(end=9, context=12, max_new_tokens=3, turns=True)
NAMES = ("solver", "critic")


class Keeper(SampleSink):
    """Keeps what is added, as a log would."""

    limits, seed, generation = LIMITS, 3, 1

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def added(self, sample: Sample, delta: Delta) -> None:
        self.deltas += decode_deltas(encode_deltas([delta]))


def begun(keeper: Keeper | None = None, **start: Any) -> Episode:
    known: dict[str, Any] = {"ordinal": 4, "sample": 1, "prompt": (1, 2), **start}
    return Episode(keeper or Keeper(), Trajectory(**known), version=7, policies=NAMES)


def say(episode: Episode, *tokens: int) -> None:
    episode.extend(tokens, [-0.5] * len(tokens))


def test_policies_take_turns_and_every_token_has_its_speaker() -> None:
    keeper = Keeper()
    episode = begun(keeper)
    assert (episode.speaker, episode.turn, episode.turn_over) == ("solver", 0, False)
    say(episode, 5, 9)
    assert episode.turn_over and episode.spoken == (5, 9) and not episode.finished
    episode.reply(Observation(text="?", speaker="critic", state={"first": 0.5}), (8,))
    assert (episode.speaker, episode.turn, episode.spoken) == ("critic", 1, ())
    assert episode.state == {"first": 0.5} and episode.text == (1, 2, 5, 9, 8)
    say(episode, 6, 6, 6)  # as long as a turn may be
    episode.reply(Observation(speaker="solver"))
    say(episode, 9)
    episode.reply(Observation(rewards={"solver": 1.0, "critic": 0.5}))
    assert episode.finished and episode.sampled == 6
    done = episode.trajectory()
    assert [*zip(done.spans, done.speakers, strict=True)] == [((0, 2), 0), ((3, 6), 1), ((6, 7), 0)]
    assert (done.reward_of(0), done.reward_of(1), done.reward) == (1.0, 0.5, 0.75)
    assert done.token_versions == [7] * 6
    assert sum(len(each.tokens) for each in keeper.deltas) == 7
    assert [turn.then for each in keeper.deltas for turn in each.turns] == [1, 0, 0]


def test_one_that_was_lost_before_its_reply_is_replied_to_elsewhere() -> None:
    first = begun()
    say(first, 5, 9)
    other = Episode(Keeper(), first.trajectory(), version=7, policies=NAMES)
    assert other.turn_over
    for episode in (first, other):
        episode.reply(Observation(speaker="critic"), (8,))
    assert first.trajectory() == other.trajectory()


def test_an_environment_of_the_job_may_reply() -> None:
    episode = begun()
    say(episode, 5, 9)
    assert episode.action("five") == Action(
        ordinal=4, sample=1, turn=0, text="five", ended=True, state=None, speaker="solver"
    )


def test_a_reply_that_leaves_no_room_ends_the_episode() -> None:
    episode = begun()
    say(episode, 5, 9)
    episode.reply(Observation(text="long"), (1,) * 8)
    done = episode.trajectory()
    assert episode.finished and done.reward == 0.0 and "no room" in done.reason
    assert done.tokens == (5, 9)


def test_what_comes_too_early_or_too_late_is_refused() -> None:
    episode = begun()
    with pytest.raises(ConfigError, match="has a turn 0 that lasts"):
        episode.reply(Observation())
    say(episode, 9)
    with pytest.raises(ConfigError, match="is over: reply"):
        say(episode, 5)
    with pytest.raises(ConfigError, match="give those of the text"):
        episode.reply(Observation(text="?"))
    with pytest.raises(JobFailedError, match="names policy 'judge'"):
        episode.reply(Observation(speaker="judge"))
    with pytest.raises(JobFailedError, match="none to"):
        episode.reply(Observation(rewards={"solver": 1.0}))
    episode.reply(Observation(reward=1.0))
    with pytest.raises(ConfigError, match="is finished"):
        episode.reply(Observation())
    with pytest.raises(ConfigError, match="is finished"):
        say(episode, 5)


def test_one_that_was_given_up_takes_nothing_more() -> None:
    keeper = Keeper()
    episode = begun(keeper)
    say(episode, 9)
    episode.give_up()
    episode.reply(Observation(reward=1.0))
    say(episode, 5)
    assert episode.finished and len(keeper.deltas) == 1


def test_engines_of_a_pool_refuse_turns() -> None:
    with pytest.raises(ConfigError, match="answers of one turn"):
        PoolWork(begun())
