"""Turns of two policies are the same whatever interrupts them, and are logged in their order."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from doubles.draining import drain

from holdfast.adapters.rl.config import preset
from holdfast.adapters.rl.environments.base import Action, Reply
from holdfast.adapters.rl.environments.registry import EnvironmentConfig, make_environment
from holdfast.adapters.rl.loss.ppo import target_logprobs
from holdfast.adapters.rl.policy.policy import full_tensors
from holdfast.adapters.rl.policy.settings import PolicyConfig
from holdfast.adapters.rl.policy.team import joined
from holdfast.adapters.rl.rollout.episodes import Episodes
from holdfast.adapters.rl.rollout.speakers import engines_of
from holdfast.adapters.rl.samples.token_record import encode_deltas, fold
from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory
from holdfast.adapters.rl.weights.setup import Policies

torch.set_num_threads(1)
TINY = preset("tiny")
CONFIG = msgspec.structs.replace(
    TINY,
    environment=EnvironmentConfig(factory="reviewed"),
    policies={"solver": PolicyConfig(), "critic": PolicyConfig()},
    model=msgspec.structs.replace(TINY.model, context=32),
    max_new_tokens=5,
    slots=3,
)
WEIGHTS = full_tensors(joined(Policies(CONFIG).each()))
ENVIRONMENT = make_environment(EnvironmentConfig(factory="reviewed"), seed=CONFIG.task_seed)


class LateCalls:
    """Calls that are answered one after another, each with some chance at every look."""

    def __init__(self, seed: int, share: float) -> None:
        self._random, self._share = random.Random(seed), share
        self._open: dict[SampleId, Action] = {}
        self.speakers: list[tuple[int, str]] = []

    def submit(self, action: Action) -> None:
        self._open[action.key] = action
        self.speakers.append((action.turn, action.speaker))

    def replies(self, wait_s: float) -> list[tuple[SampleId, Reply]]:
        ready = [key for key in self._open if self._random.random() < self._share]
        return [(key, ENVIRONMENT.respond(self._open.pop(key))) for key in ready]

    def drop(self, keys: set[SampleId]) -> None:
        for key in keys:
            self._open.pop(key, None)


def make_episodes(calls: LateCalls, *, pinned: bool = True) -> Episodes:
    policies = Policies(CONFIG).each()
    engines = engines_of(CONFIG, policies, pinned=pinned)
    episodes = Episodes(engines, calls, tokenizer=CONFIG.tokenizer, names=[*policies])
    episodes.load(WEIGHTS, version=1, generation=1)
    return episodes


def blank(ordinal: int, sample: int) -> Trajectory:
    prompt = CONFIG.tokenizer.encode(ENVIRONMENT.prompt(ordinal))
    return Trajectory(ordinal=ordinal, sample=sample, prompt=prompt)


WORK = [blank(ordinal, sample) for ordinal in range(6) for sample in range(2)]


CALM = LateCalls(0, 1.0)
EXPECTED = drain(make_episodes(CALM), WORK)


def test_the_environment_says_who_speaks_and_is_told_who_spoke() -> None:
    assert {*CALM.speakers} == {(0, "solver"), (1, "critic"), (2, "solver")}
    assert {tuple(each.speakers) for each in EXPECTED.values()} == {(0, 1, 0)}
    assert all(len(each.turns[-1].rewards) == 2 for each in EXPECTED.values())


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_when_replies_come_does_not_show_in_what_is_said(share: float) -> None:
    assert drain(make_episodes(LateCalls(3, share)), WORK) == EXPECTED


@pytest.mark.parametrize("seed", range(4))
def test_another_worker_goes_on_with_what_was_logged_at_any_moment(seed: int) -> None:
    chance = random.Random(seed)
    episodes, records, waiting = make_episodes(LateCalls(seed, 0.4)), list[bytes](), list(WORK)
    done: dict[SampleId, Trajectory] = {}
    for _ in range(chance.randint(5, 40)):
        while waiting and episodes.free:
            episodes.put(waiting.pop(0))
        done |= {trajectory.key: trajectory for trajectory in episodes.tick()}
        if chance.random() < 0.4 and (deltas := episodes.take_deltas()):
            records.append(encode_deltas(deltas))
    if deltas := episodes.take_deltas():
        records.append(encode_deltas(deltas))
    prompts = {each.key: each.prompt for each in WORK}
    logged = {key: each.whole(prompts[key]) for key, each in fold(records).items()}
    for trajectory in (*done.values(), *episodes.running()):
        assert not trajectory.tokens or logged[trajectory.key] == trajectory
    begun = [logged.get(each.key, each) for each in WORK]
    left = [each for each in begun if not CONFIG.limits.finished(each)]
    finished = {each.key: each for each in begun if CONFIG.limits.finished(each)}
    chance.shuffle(left)  # so that more of one policy than it has slots may come first
    assert finished | drain(make_episodes(LateCalls(seed + 9, 0.4)), left) == EXPECTED


@pytest.mark.parametrize("pinned", [True, False])
def test_each_token_has_the_log_probability_of_the_policy_that_spoke_it(pinned: bool) -> None:
    policies = [*Policies(CONFIG).each().values()]
    found = drain(make_episodes(LateCalls(1, 0.5), pinned=pinned), WORK)
    for trajectory in found.values():
        text = torch.tensor([trajectory.prompt + trajectory.tokens])
        at, expected = len(trajectory.prompt) - 1, list[float]()
        for (start, end), who in zip(trajectory.spans, trajectory.speakers, strict=True):
            logprobs = target_logprobs(policies[who](text), text)[0]
            expected += logprobs[at + start : at + end].tolist()
        assert trajectory.logprobs == pytest.approx(expected, abs=1e-5)


def test_work_beyond_the_slots_of_its_speaker_waits_and_counts() -> None:
    episodes = make_episodes(LateCalls(5, 1.0))
    begun = [
        each.first(next(n for n in range(each.sampled + 1) if each.first(n).speaker == 1))
        for each in EXPECTED.values()
    ]
    for each in begun[: CONFIG.slots + 2]:
        episodes.put(each)
    assert episodes.free >= 0
    assert len(episodes.running()) == CONFIG.slots + 2
    assert {*episodes.progress()} == {each.key for each in begun[: CONFIG.slots + 2]}
    done = drain(episodes, [])
    assert all(EXPECTED[key] == each for key, each in done.items())
    assert len(done) == CONFIG.slots + 2
