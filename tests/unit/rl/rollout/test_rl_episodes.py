"""An episode is the same under waits, failures and handovers; replies are logged and kept."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
import torch
from doubles.draining import drain

from holdfast.adapters.rl.config import RLConfig, preset
from holdfast.adapters.rl.environments.base import HELD_OUT, Action, Failed, Observation, Reply
from holdfast.adapters.rl.environments.calls import ThreadedCalls
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.environments.slow_tool import SlowTool
from holdfast.adapters.rl.loss.ppo import target_logprobs
from holdfast.adapters.rl.policy.policy import full_tensors
from holdfast.adapters.rl.rollout.engine import Engine
from holdfast.adapters.rl.rollout.episodes import Episodes
from holdfast.adapters.rl.samples.token_record import encode_deltas, fold
from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory
from holdfast.adapters.rl.training.held_out_episodes import Player
from holdfast.adapters.rl.weights.initial import build_policy

torch.set_num_threads(1)
CHOSEN = EnvironmentConfig(factory="slow_tool")
CONFIG = msgspec.structs.replace(preset("tiny"), environment=CHOSEN, slots=4, max_new_tokens=3)
CONFIG = msgspec.structs.replace(CONFIG, model=msgspec.structs.replace(CONFIG.model, context=48))
WEIGHTS = full_tensors(build_policy(CONFIG))
TOOL = SlowTool(seed=1, turns=2.5, most_turns=4, letters=2.0, sleep=lambda _: None)


class LateCalls:
    """Calls that are answered one after another, each with some chance at every look."""

    def __init__(self, seed: int, share: float = 0.3, respond: Callable[..., Reply] | None = None):
        self._random, self._share = random.Random(seed), share
        self._respond = respond or TOOL.respond
        self.open: dict[SampleId, Action] = {}
        self.made: list[tuple[SampleId, int]] = []

    def submit(self, action: Action) -> None:
        assert action.key not in self.open
        self.open[action.key] = action
        self.made.append((action.key, action.turn))

    def replies(self, wait_s: float) -> list[tuple[SampleId, Reply]]:
        ready = [key for key in self.open if self._random.random() < self._share]
        return [(key, self._respond(self.open.pop(key))) for key in ready]

    def drop(self, keys: set[SampleId]) -> None:
        for key in keys:
            self.open.pop(key, None)


def make_engine(config: RLConfig = CONFIG, *, pinned: bool = True) -> Engine:
    return Engine(
        policy=build_policy(config),
        limits=config.limits,
        slots=config.slots,
        seed=config.seed,
        pinned=pinned,
    )


def make_episodes(
    calls: LateCalls, *, waiting: int = 64, pinned: bool = True, version: int = 1
) -> Episodes:
    episodes = Episodes(
        [make_engine(pinned=pinned)], calls, tokenizer=CONFIG.tokenizer, waiting=waiting
    )
    episodes.load(WEIGHTS, version=version, generation=1)
    return episodes


def blank(ordinal: int, sample: int) -> Trajectory:
    prompt = CONFIG.tokenizer.encode(TOOL.prompt(ordinal))
    return Trajectory(ordinal=ordinal, sample=sample, prompt=prompt)


WORK = [blank(ordinal, sample) for ordinal in range(6) for sample in range(2)]


EXPECTED = drain(make_episodes(LateCalls(0, share=1.0)), WORK)


def test_episodes_have_the_turns_the_environment_wanted_and_its_reward() -> None:
    assert EXPECTED.keys() == {trajectory.key for trajectory in WORK}
    for trajectory in EXPECTED.values():
        assert len(trajectory.turns) == TOOL.turns_of(*trajectory.key)
        assert CONFIG.limits.finished(trajectory)
        assert 0 <= (trajectory.reward or 0.0) <= 1
    assert len({len(trajectory.turns) for trajectory in EXPECTED.values()}) > 1


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_when_replies_come_does_not_show_in_what_is_sampled(share: float) -> None:
    assert drain(make_episodes(LateCalls(3, share=share)), WORK) == EXPECTED


def test_the_trainer_sees_the_log_probabilities_that_were_recorded() -> None:
    policy = build_policy(CONFIG)
    for trajectory in EXPECTED.values():
        tokens = torch.tensor([trajectory.prompt + trajectory.tokens])
        logprobs = target_logprobs(policy(tokens), tokens)[0, len(trajectory.prompt) - 1 :].tolist()
        own = [logprobs[at] for start, stop in trajectory.spans for at in range(start, stop)]
        assert own == pytest.approx(trajectory.logprobs, abs=1e-5)


def test_an_episode_that_waits_gives_its_slot_to_another() -> None:
    calls = LateCalls(0, share=0.0)
    episodes = make_episodes(calls, waiting=5)
    waiting = list(WORK)
    for _ in range(200):
        while waiting and episodes.free:
            episodes.put(waiting.pop(0))
        episodes.tick()
    assert len(calls.open) == CONFIG.slots + 5, "as many as may be at work"
    assert (episodes.free, episodes.idle) == (0, False)
    assert len(episodes.running()) == len(episodes.progress()) == 9


def test_a_reply_that_comes_soon_needs_no_second_feeding() -> None:
    fed: list[int] = []

    def ticks(share: float, extra: int) -> int:
        episodes = make_episodes(LateCalls(1, share=share))
        decode = episodes._first.policy.decode
        episodes._first.policy.decode = lambda *a: (fed.append(1), decode(*a))[1]  # type: ignore[method-assign]
        fed.clear()
        done = drain(episodes, WORK[:1] + WORK[1 : 1 + extra])
        assert done.items() <= EXPECTED.items()
        return len(fed)

    (key,) = [WORK[0].key]
    length = len(EXPECTED[key].tokens) + len(WORK[0].prompt) - 1
    assert ticks(1.0, extra=0) == length
    assert ticks(0.1, extra=0) == length


@pytest.mark.parametrize("seed", range(4))
def test_an_episode_goes_on_elsewhere_from_the_log_and_repeats_no_recorded_call(seed: int) -> None:
    timing = random.Random(seed)
    waiting, done = list(WORK), dict[SampleId, Trajectory]()
    made, recorded = 0, set[tuple[SampleId, int]]()
    while waiting:
        calls, records = LateCalls(timing.randrange(99)), list[bytes]()
        episodes = make_episodes(calls)
        for _ in range(timing.randrange(5, 40)):
            while waiting and episodes.free:
                episodes.put(waiting.pop(0))
            done |= {trajectory.key: trajectory for trajectory in episodes.tick()}
            if timing.random() < 0.5:
                records.append(encode_deltas(episodes.take_deltas()))
        left = {trajectory.key: trajectory for trajectory in episodes.running()}
        records.append(encode_deltas(episodes.take_deltas()))
        logged = fold(records)
        for key, trajectory in left.items():  # the worker dies; its log has everything
            found = logged[key].whole(trajectory.prompt) if key in logged else trajectory.first(0)
            assert found == trajectory
            waiting.append(found)
        for key, piece in logged.items():
            assert piece.turns == (left | done)[key].turns[: len(piece.turns)]
        assert recorded.isdisjoint(calls.made)
        recorded |= {(key, turn) for key in logged for turn in range(len(logged[key].turns))}
        made += len(calls.made)
    assert done == EXPECTED
    assert made >= sum(len(trajectory.turns) for trajectory in EXPECTED.values())


def test_a_recorded_call_is_not_made_again() -> None:
    calls = LateCalls(0, share=1.0)
    episodes = make_episodes(calls)
    started = next(each for each in EXPECTED.values() if len(each.turns) > 1)
    beginning = started.first(started.turns[0].end)
    assert len(beginning.turns) == 1
    assert drain(episodes, [beginning]) == {started.key: started}
    assert (started.key, 0) not in calls.made


def test_a_turn_that_was_over_before_its_reply_is_replied_to_first() -> None:
    started = next(each for each in EXPECTED.values() if len(each.turns) > 1)
    cut = msgspec.structs.replace(
        started.first(started.turns[0].end), turns=(), tokens=started.tokens[: started.turns[0].end]
    )
    calls = LateCalls(0, share=1.0)
    episodes = make_episodes(calls)
    episodes.put(cut)
    assert calls.made == [(started.key, 0)]
    records = [encode_deltas(episodes.take_deltas())]
    assert drain(episodes, []) == {started.key: started}
    records.append(encode_deltas(episodes.take_deltas()))
    assert fold(records)[started.key].whole(started.prompt) == started


def test_what_is_dropped_or_unloaded_is_forgotten() -> None:
    calls = LateCalls(0, share=0.0)
    episodes = make_episodes(calls)
    for trajectory in WORK[:4]:
        episodes.put(trajectory)
    while len(calls.open) < 4:
        episodes.tick()
    episodes.drop({WORK[0].key})
    assert WORK[0].key not in calls.open
    assert {each.key for each in episodes.running()} == {each.key for each in WORK[1:4]}
    with pytest.raises(RuntimeError, match="version 2 offered while version 1 is in use"):
        episodes.load(WEIGHTS, version=2, generation=1)
    episodes.unload()
    assert (episodes.idle, episodes.version, calls.open) == (True, None, {})


def test_episodes_that_wait_go_on_under_new_weights_where_they_may() -> None:
    calls = LateCalls(0, share=0.0)
    episodes = make_episodes(calls, pinned=False)
    episodes.put(WORK[2])
    while not calls.open:
        episodes.tick()
    episodes.load(WEIGHTS, version=2, generation=1)
    calls._share = 1.0
    (done,) = drain(episodes, []).values()
    expected = EXPECTED[WORK[2].key]
    assert (done.tokens, done.logprobs) == (expected.tokens, expected.logprobs)
    assert [(s.version, s.count) for s in done.stamps] == [
        (1, done.turns[0].end),
        (2, done.sampled - done.turns[0].end),
    ]


def test_a_call_given_up_ends_the_episode_with_its_reason_and_no_reward() -> None:
    gone = Failed(reason="turn 0 was given up")
    episodes = make_episodes(LateCalls(0, share=1.0, respond=lambda _: gone))
    (done,) = drain(episodes, WORK[:1]).values()
    assert (done.reward, done.reason, len(done.turns)) == (0.0, "turn 0 was given up", 1)


def test_an_observation_without_room_ends_the_episode() -> None:
    talk = Observation(text="x" * 40)
    episodes = make_episodes(LateCalls(0, share=1.0, respond=lambda _: talk))
    (done,) = drain(episodes, WORK[:1]).values()
    assert done.reward == 0.0
    assert done.reason == "48 tokens with the observation leave no room in a context of 48"


def test_held_out_episodes_earn_the_same_every_time_on_threads() -> None:
    calls = msgspec.structs.replace(CHOSEN, threads=2, waiting=1)
    player = Player(CONFIG, {"": build_policy(CONFIG)}, TOOL, calls)
    ordinals = [HELD_OUT + number for number in range(7)]
    checked: list[int] = []
    found = player.rewards(WEIGHTS, ordinals, check=lambda: checked.append(1))
    assert found == player.rewards(WEIGHTS, ordinals, check=lambda: None)
    assert player.rewards(WEIGHTS, ordinals[::2], check=lambda: None) == found[::2]
    assert checked


def test_threads_and_a_fake_sample_the_same_episodes() -> None:
    episodes = Episodes([make_engine()], ThreadedCalls(TOOL, threads=3), tokenizer=CONFIG.tokenizer)
    episodes.load(WEIGHTS, version=1, generation=1)
    assert drain(episodes, WORK) == EXPECTED
