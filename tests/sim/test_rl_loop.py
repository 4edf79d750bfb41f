"""The whole asynchronous loop in one process, with the real parts and a random scheduler.

Workers have random speeds and die with their memory (their log stays). The trainer dies with
everything and is restored from a random earlier snapshot; or everything dies, logs and snapshots
included, and is started again from a checkpoint. If samples are pinned to a version, the final
weights must equal those of the undisturbed run, bit for bit. If samples continue under new weights,
no token may be of a version too old, and each must have the log-probability of its version. A
failure prints the seed that replays it.
"""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from holdfast.adapters.rl.config import RLConfig, preset
from holdfast.adapters.rl.environments.base import Action, Environment, Reply
from holdfast.adapters.rl.environments.registry import EnvironmentConfig, make_environment
from holdfast.adapters.rl.environments.task import make_task
from holdfast.adapters.rl.ledger.checker import StepChecker, observe
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.order import GroupOrder
from holdfast.adapters.rl.ledger.plan import Mode
from holdfast.adapters.rl.ledger.replay import ReplayConfig
from holdfast.adapters.rl.ledger.scheduling import Scheduling
from holdfast.adapters.rl.loss.advantages import group_advantages
from holdfast.adapters.rl.loss.batch import collate
from holdfast.adapters.rl.loss.ppo import policy_loss, target_logprobs
from holdfast.adapters.rl.policy.model import weights_hash
from holdfast.adapters.rl.policy.settings import PolicyConfig
from holdfast.adapters.rl.policy.team import joined, prefix_of
from holdfast.adapters.rl.rollout.engine import Engine
from holdfast.adapters.rl.rollout.episodes import Episodes
from holdfast.adapters.rl.rollout.speakers import engines_of
from holdfast.adapters.rl.samples.token_log import TokenLog
from holdfast.adapters.rl.samples.token_record import fold
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory
from holdfast.adapters.rl.training.proximal import Recomputed
from holdfast.adapters.rl.weights.initial import build_policy
from holdfast.adapters.rl.weights.places import slot_of
from holdfast.adapters.rl.weights.retained import Retained
from holdfast.adapters.rl.weights.setup import Policies
from holdfast.adapters.rl.weights.warm_up import warm_up

torch.set_num_threads(1)
CONFIG = msgspec.structs.replace(preset("tiny"), steps=5)
TASK = make_task(CONFIG.task, seed=CONFIG.task_seed, exact_weight=CONFIG.exact_weight)
TOKENIZER = CONFIG.tokenizer
WARM = copy.deepcopy(warm_up(CONFIG, TASK).state_dict())
EPISODES = msgspec.structs.replace(
    CONFIG,
    environment=EnvironmentConfig(factory="two_turns"),
    model=msgspec.structs.replace(CONFIG.model, context=32),
    slots=4,
    steps=4,
)
TEAM = msgspec.structs.replace(
    EPISODES,
    environment=EnvironmentConfig(factory="reviewed"),
    policies={"solver": PolicyConfig(), "critic": PolicyConfig()},
)
"""The warm-up of both policies is that of the task."""

EPISODES_WARM = copy.deepcopy(warm_up(EPISODES, TASK).state_dict())


def environment_of(config: RLConfig) -> Environment | None:
    chosen = config.environment
    return None if chosen is None else make_environment(chosen, seed=config.task_seed)


def prompt_of(ordinal: int) -> Tokens:
    return TOKENIZER.encode(TASK.train(ordinal).prompt)


def reward_of(sample: Trajectory) -> float:
    if sample.reward is not None:
        return sample.reward
    ended = sample.tokens[-1] == TOKENIZER.end
    text = TOKENIZER.decode(sample.tokens[:-1] if ended else sample.tokens)
    return TASK.reward(sample.ordinal, text, ended=ended)


def drawn_reward(sample: Trajectory) -> float:
    """Return a reward that one of three answers earns, so that those of some groups are equal."""
    return float(sum(sample.tokens) % 3 == 0)


class FakeLog:
    """A sidecar's record log."""

    def __init__(self) -> None:
        self.first, self.records = 0, list[bytes]()

    def log_open(self, name: str) -> int:
        return self.first + len(self.records)

    def log_append(self, name: str, records: Any) -> int:
        self.records += records
        return self.first + len(self.records)

    def log_truncate(self, name: str, keep_from: int) -> None:
        self.records = self.records[keep_from - self.first :]
        self.first = keep_from


class SimulatedCalls:
    """Calls of an environment; who is asked when replies come is the scheduler's."""

    def __init__(self, scheduler: random.Random, environment: Environment | None) -> None:
        self._random, self._environment = scheduler, environment
        self._open: dict[SampleId, Action] = {}
        self.made: set[tuple[SampleId, int]] = set()

    def submit(self, action: Action) -> None:
        self._open[action.key] = action
        self.made.add((action.key, action.turn))

    def replies(self, wait_s: float) -> list[tuple[SampleId, Reply]]:
        ready = [key for key in self._open if self._random.random() < 0.3]
        assert self._environment is not None
        return [(key, self._environment.respond(self._open.pop(key))) for key in ready]

    def drop(self, keys: set[SampleId]) -> None:
        for key in keys:
            self._open.pop(key, None)


class SimulatedWorker:
    """A rollout worker without a process: engine, log, and its finished and running samples."""

    def __init__(
        self, name: str, config: RLConfig, *, pinned: bool, scheduler: random.Random
    ) -> None:
        self.name = name
        policies = Policies(config).each()
        engines = engines_of(config, policies, pinned=pinned)
        self.calls = SimulatedCalls(scheduler, environment_of(config))
        self.engine: Engine | Episodes = engines[0]
        if config.environment is not None:
            self.engine = Episodes(
                engines, self.calls, tokenizer=TOKENIZER, waiting=8, names=[*policies]
            )
        self.store = FakeLog()
        self.log = TokenLog(lambda: self.store, name)
        self.finished: dict[SampleId, Trajectory] = {}

    def holding(self) -> list[Trajectory]:
        return [*self.finished.values(), *self.engine.running()]


class SimulatedJob:
    """Trainer state, ledger and workers, stepped by a seeded scheduler."""

    def __init__(
        self,
        seed: int,
        *,
        mode: Mode = Mode.FIXED_LAG,
        kill_worker: float = 0.0,
        kill_trainer: float = 0.0,
        kill_job: float = 0.0,
        scheduling: Scheduling | None = None,
        replay: ReplayConfig | None = None,
        config: RLConfig = CONFIG,
    ) -> None:
        self.config = config
        self.plan = msgspec.structs.replace(
            config,
            mode=mode,
            scheduling=scheduling or Scheduling(),
            replay=replay or ReplayConfig(),
        ).plan
        self.recorded: set[tuple[SampleId, int]] = set()
        self.random = random.Random(seed)
        self.kill_worker, self.kill_trainer, self.kill_job = kill_worker, kill_trainer, kill_job
        self.generation, self.born, self.kills, self.renewed_at_work = 1, 0, 0, 0
        self.from_retained = 0
        self.policies = Policies(config).each()
        for policy in self.policies.values():
            policy.load_state_dict(WARM if config.environment is None else EPISODES_WARM)
        self.model = joined(self.policies)
        self.optimizers = [
            torch.optim.AdamW(each.parameters(), lr=config.lr) for each in self.policies.values()
        ]
        self.reward_of = drawn_reward if self.plan.skips else reward_of
        self.ledger, self.checker = self._new_ledger(), StepChecker()
        self.ledger.resume(1, restored=0)
        self.retained = Retained([joined(Policies(config).each()) for _ in range(self.plan.eta)])
        self.snapshots: list[dict[str, Any]] = []
        self.workers = [self._new_worker() for _ in range(2)]
        self._snapshot()

    def _new_ledger(self) -> Ledger:
        return Ledger(self.plan, policies=[*self.config.by_policy], reward_of=self.reward_of)

    def _new_worker(self) -> SimulatedWorker:
        self.born += 1
        return SimulatedWorker(
            f"worker-{self.born}", self.config, pinned=self.plan.pinned, scheduler=self.random
        )

    def _snapshot(self) -> None:
        self.ledger.admit(self.ledger.trained_steps, prompt_of)
        self.snapshots.append(
            copy.deepcopy(
                {
                    "model": self.model.state_dict(),
                    "optimizers": [each.state_dict() for each in self.optimizers],
                    "ledger": self.ledger.state_dict(),
                    "checker": self.checker.state_dict(),
                    "retained": self.retained.state_dict(),
                }
            )
        )

    def run(self) -> str:
        while self.ledger.trained_steps < self.config.steps:
            assert not self.ledger.stuck
            for index in range(len(self.workers)):
                self._turn(self.workers[index])
                if self.random.random() < self.kill_worker:
                    self._lose(index)
            if self.ledger.batch(self.ledger.trained_steps) is not None:
                self._train()
            if self.random.random() < self.kill_trainer:
                self._restore()
            if self.kill_job and self.random.random() < self.kill_job:
                self._start_again()
        assert self.ledger.check() == []
        if self.plan.pinned and not self.plan.skips:
            assert self.ledger.staleness_max == self.plan.eta
        assert self.ledger.staleness_max <= self.plan.eta
        return weights_hash(self.model.state_dict())

    def _turn(self, worker: SimulatedWorker) -> None:
        if self.random.random() < 0.3:
            return  # a slow moment
        engine = worker.engine
        if engine.free:
            bound = None if engine.idle and engine.pinned else engine.version
            for assignment in self.ledger.claim(worker.name, free=engine.free, version=bound):
                self._renew(engine, assignment.version)
                engine.put(assignment.trajectory)
        for _ in range(self.random.randint(1, 6)):
            worker.finished |= {trajectory.key: trajectory for trajectory in engine.tick()}
        if self.random.random() < 0.7:
            worker.log.append(engine.take_deltas(), worker.holding)
        if self.random.random() < 0.5:
            for trajectory in worker.finished.values():
                self.ledger.deliver(trajectory)
            self._set_aside(worker)
        released = self.ledger.released(max(0, self.ledger.trained_steps - 2))
        worker.finished = {k: t for k, t in worker.finished.items() if k[0] >= released}
        worker.log.release(released)

    def _set_aside(self, worker: SimulatedWorker) -> None:
        """Report running samples, and stop those beyond the token budget."""
        engine = worker.engine
        self.ledger.report(engine.progress())
        beyond = self.ledger.beyond_budget(worker.name) & engine.progress().keys()
        for trajectory in engine.running():
            if trajectory.key in beyond:
                self.ledger.set_aside(trajectory)
        engine.drop(beyond)
        self.ledger.abandon(worker.name, beyond)

    def _renew(self, engine: Engine | Episodes, version: int) -> None:
        """Load the wanted version; or, if a newer one is as good, sometimes the newest."""
        newest = len(self.snapshots) - 1
        if engine.pinned:
            target = version
        elif engine.version is None or engine.version < version or self.random.random() < 0.3:
            target = newest
        else:
            return
        if engine.version != target:
            self.renewed_at_work += not engine.idle
            engine.load(self._weights(target), version=target, generation=self.generation)

    def _weights(self, version: int) -> Any:
        """Return a version's weights, out of its own snapshot or what the newest one retains."""
        own: Any = self.snapshots[version].get("model")
        if own is not None:
            return own
        self.from_retained += 1
        slot = slot_of(version, retained=self.plan.eta)
        assert self.retained.versions[slot] == version
        return self.retained.get_submodule(str(slot)).state_dict()

    def _lose(self, index: int) -> None:
        """A worker dies; what its log has is salvaged, another takes its place."""
        worker, self.workers[index] = self.workers[index], self._new_worker()
        self.kills += 1
        self.ledger.lose(worker.name)
        repeated = worker.calls.made & self.recorded
        assert self.kill_trainer or not repeated, "a recorded reply was asked for again"
        for key, piece in fold(worker.store.records).items():
            self.recorded |= {(key, turn) for turn in range(len(piece.turns))}
            prompt = self.ledger.prompt(key[0])
            if prompt is not None:
                self.ledger.recover(piece.whole(prompt))

    def _train(self) -> None:
        step = self.ledger.trained_steps
        samples = self.ledger.batch(step)
        assert samples is not None
        assert self.checker.check(observe(self.ledger, step, samples)) == []
        self.ledger.train(step, [self.reward_of(t) for t in samples])
        if not self.plan.pinned:
            self._recompute(samples)
        if self.plan.eta:
            self.retained.keep(self.model, version=step)
        for speaker in range(len(self.policies)):
            self._learn(step, samples, speaker=speaker)
        self._snapshot()

    def _learn(self, step: int, samples: list[Trajectory], *, speaker: int) -> None:
        config, optimizer = self.config, self.optimizers[speaker]
        policy = [*self.policies.values()][speaker]
        earned = [self.reward_of(t) if t.reward is None else t.reward_of(speaker) for t in samples]
        rewards = torch.tensor(earned)
        batch = collate(
            samples, rewards, rows=config.rows, length=config.model.context, speaker=speaker
        ).trimmed()
        batch = batch.with_advantages(group_advantages(rewards, config.group))
        logprobs = target_logprobs(policy(batch.tokens), batch.tokens)
        optimizer.zero_grad()
        policy_loss(
            logprobs, batch, config=config.loss, step=step, scale=1 / max(1, batch.token_count)
        ).backward()
        optimizer.step()

    def _recompute(self, samples: list[Trajectory]) -> None:
        """Check every token's log-probability against the version that is said to have sampled."""
        for speaker, (name, config) in enumerate(self.config.by_policy.items()):
            batch = collate(
                samples,
                torch.zeros(len(samples)),
                rows=len(samples),
                length=config.model.context,
                speaker=speaker,
            )
            weights = partial(self._weights_of, name)
            (logprobs,) = Recomputed(build_policy(config), weights).logprobs([batch])
            torch.testing.assert_close(logprobs, batch.behavior * batch.mask, atol=1e-5, rtol=0)

    def _weights_of(self, name: str, version: int) -> Any:
        prefix, found = prefix_of(name), self._weights(version)
        return {key.removeprefix(prefix): found[key] for key in found if key.startswith(prefix)}

    def _restore(self) -> None:
        """The trainer dies; one of its two newest snapshots remains."""
        self.kills += 1
        step = max(0, self.ledger.trained_steps - self.random.randint(0, 1))
        self.generation += 1
        self._go_back(step if self.snapshots[step] else self.ledger.trained_steps)
        for worker in self.workers:
            self._meet(worker)

    def _start_again(self) -> None:
        """Everything dies; the newest snapshot had been written to a store."""
        self.kills += 1
        self.generation = 1
        self._go_back(self.ledger.trained_steps)
        self.snapshots[:-1] = [{}] * (len(self.snapshots) - 1)
        self.workers = [self._new_worker() for _ in self.workers]

    def _go_back(self, step: int) -> None:
        state = self.snapshots[step]
        self.retained.load_state_dict(state["retained"])
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(saved))
        self.ledger, self.checker = self._new_ledger(), StepChecker()
        self.ledger.load_state_dict(copy.deepcopy(state["ledger"]))
        self.checker.load_state_dict(copy.deepcopy(state["checker"]))
        self.ledger.resume(self.generation, restored=step)
        self.snapshots = self.snapshots[:step]
        self._snapshot()

    def _meet(self, worker: SimulatedWorker) -> None:
        """A worker reports its samples to the new leader."""
        engine = worker.engine
        if engine.version is not None and not self.ledger.current(
            generation=engine.generation, version=engine.version
        ):
            for trajectory in engine.running():
                self.ledger.recover(trajectory)
            engine.unload()
        for trajectory in worker.finished.values():
            self.ledger.deliver(trajectory, again=True)
        keys = self.ledger.hold(worker.name, engine.progress(), oldest=engine.oldest())
        engine.drop(keys)


UNDISTURBED = SimulatedJob(0).run()


def test_training_changes_the_weights() -> None:
    assert weights_hash(WARM) != UNDISTURBED


@pytest.mark.parametrize("seed", range(1, 3))
def test_timing_does_not_show_in_the_weights(seed: int) -> None:
    assert SimulatedJob(seed).run() == UNDISTURBED


@pytest.mark.parametrize("seed", range(10, 18))
def test_kills_of_workers_and_trainer_do_not_show_in_the_weights(seed: int) -> None:
    job = SimulatedJob(seed, kill_worker=0.05, kill_trainer=0.05)
    assert job.run() == UNDISTURBED, f"replay with SimulatedJob({seed}, ...)"
    assert job.kills > 0


@pytest.mark.parametrize("seed", range(60, 63))
def test_a_job_that_is_started_again_from_a_checkpoint_ends_with_the_same_weights(
    seed: int,
) -> None:
    job = SimulatedJob(seed, kill_worker=0.03, kill_trainer=0.05, kill_job=0.1)
    assert job.run() == UNDISTURBED, f"replay with SimulatedJob({seed}, ...)"
    assert job.from_retained > 0, "no snapshot had them any more"


def test_started_again_in_bounded_a_job_samples_nothing_too_old() -> None:
    job = SimulatedJob(63, mode=Mode.BOUNDED, kill_worker=0.05, kill_trainer=0.05, kill_job=0.1)
    job.run()
    assert job.kills > 0


def test_many_kills_cost_tokens_but_lose_none_that_were_logged() -> None:
    job = SimulatedJob(99, kill_worker=0.2)
    assert job.run() == UNDISTURBED
    assert job.ledger.counters.workers_lost == job.kills > 3
    assert job.ledger.counters.tokens_recovered > 0


@pytest.mark.parametrize("seed", range(20, 26))
def test_kills_never_make_bounded_samples_too_old_or_of_an_undone_version(seed: int) -> None:
    job = SimulatedJob(seed, mode=Mode.BOUNDED, kill_worker=0.1, kill_trainer=0.1)
    job.run()
    assert job.kills > 0
    assert job.renewed_at_work > 0, "some samples went on under new weights"


@pytest.mark.parametrize("seed", range(30, 33))
def test_the_order_of_work_does_not_show_in_the_weights(seed: int) -> None:
    scheduling = Scheduling(claims="longest", over_provision=0.5, ledger_tokens=40)
    job = SimulatedJob(seed, kill_worker=0.05, kill_trainer=0.05, scheduling=scheduling)
    assert job.run() == UNDISTURBED


@pytest.mark.parametrize("seed", range(40, 44))
def test_what_is_trained_as_it_arrives_is_never_too_old_through_kills(seed: int) -> None:
    scheduling = Scheduling(
        order=GroupOrder.ARRIVAL, claims="longest", over_provision=1.0, token_budget=60
    )
    job = SimulatedJob(
        seed, mode=Mode.BOUNDED, kill_worker=0.1, kill_trainer=0.1, scheduling=scheduling
    )
    job.run()
    assert job.kills > 0
    assert job.ledger.counts()["trained"] == CONFIG.steps * CONFIG.groups
    assert job.ledger.counters.samples_set_aside > 0


@pytest.mark.parametrize("policy", ["recent", "prioritized"])
def test_kills_do_not_show_in_what_is_taken_again(policy: Any) -> None:
    replay = ReplayConfig(policy=policy, share=0.5, max_age=2)
    calm = SimulatedJob(50, replay=replay)
    weights = calm.run()
    job = SimulatedJob(51, kill_worker=0.1, kill_trainer=0.1, replay=replay)
    assert job.run() == weights != UNDISTURBED
    assert job.kills > 0
    assert job.ledger.uses == calm.ledger.uses
    assert job.ledger.counters.groups_reused == calm.ledger.counters.groups_reused > 0


@pytest.mark.parametrize("mode", [Mode.FIXED_LAG, Mode.SYNC])
def test_kills_do_not_show_in_what_is_passed_over(mode: Mode) -> None:
    scheduling = Scheduling(skip_equal=5)
    calm = SimulatedJob(70, mode=mode, scheduling=scheduling)
    weights = calm.run()
    job = SimulatedJob(
        71, mode=mode, kill_worker=0.05, kill_trainer=0.05, kill_job=0.03, scheduling=scheduling
    )
    assert job.run() == weights != UNDISTURBED
    assert job.kills > 0
    assert job.ledger.counters.groups_skipped == calm.ledger.counters.groups_skipped > 0
    assert job.ledger.counts()["trained"] == CONFIG.steps * CONFIG.groups


def test_in_turns_every_step_trains_on_its_own_version() -> None:
    job = SimulatedJob(3, mode=Mode.SYNC, kill_worker=0.05, kill_trainer=0.05)
    assert job.run() == SimulatedJob(4, mode=Mode.SYNC).run() != UNDISTURBED
    assert job.ledger.staleness_max == 0


@pytest.fixture(scope="module")
def two_turns_undisturbed() -> str:
    return SimulatedJob(0, config=EPISODES).run()


@pytest.mark.parametrize("seed", range(30, 33))
def test_late_replies_and_kills_do_not_show_in_the_weights_of_a_two_turn_task(
    seed: int, two_turns_undisturbed: str
) -> None:
    job = SimulatedJob(seed, kill_worker=0.04, kill_trainer=0.04, config=EPISODES)
    assert job.run() == two_turns_undisturbed, f"replay with SimulatedJob({seed}, ...)"
    assert job.kills > 0


def test_replies_that_were_recorded_are_never_asked_for_again(two_turns_undisturbed: str) -> None:
    job = SimulatedJob(40, kill_worker=0.15, config=EPISODES)
    assert job.run() == two_turns_undisturbed
    assert job.kills > 3
    assert job.recorded


def test_bounded_episodes_go_on_under_new_weights_and_are_never_too_old() -> None:
    job = SimulatedJob(41, mode=Mode.BOUNDED, kill_worker=0.05, kill_trainer=0.05, config=EPISODES)
    job.run()
    assert job.kills > 0
    assert job.renewed_at_work > 0


@pytest.fixture(scope="module")
def team_undisturbed() -> str:
    return SimulatedJob(0, config=TEAM).run()


@pytest.mark.parametrize("seed", range(50, 53))
def test_kills_do_not_show_in_the_weights_of_two_policies_that_speak_in_turns(
    seed: int, team_undisturbed: str
) -> None:
    job = SimulatedJob(seed, kill_worker=0.04, kill_trainer=0.04, config=TEAM)
    assert job.run() == team_undisturbed, f"replay with SimulatedJob({seed}, ...)"
    assert job.kills > 0
    books = job.ledger.books.report()
    assert books["solver"]["turns"] > books["critic"]["turns"] > 0
    assert sum(job.ledger.books.tokens) == job.ledger.counters.tokens_sampled


@pytest.mark.exhaustive  # a process test kills two policies too
def test_two_policies_started_again_from_a_checkpoint_end_with_the_same_weights(
    team_undisturbed: str,
) -> None:
    job = SimulatedJob(60, kill_worker=0.03, kill_trainer=0.05, kill_job=0.1, config=TEAM)
    assert job.run() == team_undisturbed
    assert job.from_retained > 0


def test_bounded_turns_of_two_policies_have_the_log_probabilities_of_their_versions() -> None:
    job = SimulatedJob(53, mode=Mode.BOUNDED, kill_worker=0.05, kill_trainer=0.05, config=TEAM)
    job.run()
    assert job.kills > 0
    assert job.renewed_at_work > 0
