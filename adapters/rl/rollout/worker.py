"""A rollout worker: claims work, pulls weights, samples, logs, delivers.

It never ends because the trainer is away (see `sampling_client`): it goes on with what it has. Told
to leave, it hands what it is at work on to the leader, and stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from holdfast.adapters.rl.cast.others import OtherPolicies
from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.environments.base import FrozenModel
from holdfast.adapters.rl.environments.starting import start_calls
from holdfast.adapters.rl.policy.policy import Policy, parameter_names
from holdfast.adapters.rl.policy.team import joined
from holdfast.adapters.rl.rollout.engine import Engine
from holdfast.adapters.rl.rollout.episodes import Episodes
from holdfast.adapters.rl.rollout.meter import Meter
from holdfast.adapters.rl.rollout.sampling_client import RETRY_S, Host, SamplingClient
from holdfast.adapters.rl.rollout.speakers import engines_of, judges_of
from holdfast.adapters.rl.weights.setup import Policies
from holdfast.elastic.channel.base import WorkerPhase


class RolloutWorker(SamplingClient):
    """The worker of the module's docstring; ``stopped`` says when to end."""

    _engine: Engine | Episodes

    def __init__(self, host: Host, config: RLConfig, *, stopped: Callable[[], bool]) -> None:
        policies = Policies(config)
        each = policies.each()
        super().__init__(
            host,
            _build_engine(each, config, host, classifiers=policies.classifiers),
            parameter_names(
                joined({name: each[name] for name in each if name not in config.elsewhere})
            ),
            stopped=stopped,
            frozen=policies.frozen,
            retained=config.retained,
            most_tokens=config.scheduling.worker_tokens,
            elsewhere=(OtherPolicies(config, frozen=policies.frozen) if config.elsewhere else None),
        )
        self._config, self._meter = config, Meter()

    def run(self) -> None:
        """Work until stopped."""
        try:
            while not self._stopped():
                if self.attend():
                    self._sample()
        finally:
            self.close()

    def _sample(self) -> None:
        """Feed some tokens; when idle, sleep a moment."""
        engine = self._engine
        if engine.idle:
            self._tell(0)
            self._host.beat(step=self._ticks, phase=WorkerPhase.IDLE)
            pause = self._next_exchange - time.monotonic() if self._link else RETRY_S
            if pause > 0:
                time.sleep(min(pause, RETRY_S))
            return
        meter = self._meter
        with meter.sampling():
            for _ in range(self._config.log_every_ticks):
                self._host.beat(step=self._ticks, phase=WorkerPhase.COMPUTE)
                self._ticks += 1
                for trajectory in engine.tick():
                    self.finish(trajectory)
        self._host.beat(step=self._ticks, phase=WorkerPhase.WAIT)
        deltas = engine.take_deltas()
        sampled = sum(len(delta.logprobs) for delta in deltas)
        self._sampled += sampled
        meter.tokens += sampled
        if self._config.log_rollouts:
            with meter.logging():
                self.log(deltas)
        meter.tell(self._host.emit, logged_bytes=self._log.written_bytes)
        if deltas:
            self._tell(sum(count > 0 for count in engine.progress().values()))


def _build_engine(
    policies: Mapping[str, Policy],
    config: RLConfig,
    host: Host,
    *,
    classifiers: Mapping[str, FrozenModel],
) -> Engine | Episodes:
    engines = engines_of(
        config, policies, pinned=config.plan.pinned, precision=config.rollout_precision
    )
    if config.environment is None:
        return engines[0]
    calls = start_calls(
        config.environment,
        seed=config.task_seed,
        owner=host.seat,
        frozen_policies={**judges_of(config, policies), **classifiers},
        emit=host.emit,
    )
    waiting = config.environment.waiting
    return Episodes(engines, calls, tokenizer=config.tokenizer, waiting=waiting, names=[*policies])
