"""RL in ``fixed_lag`` in one process without failures, for studies of the loss.

The parts are the trainer's own: assessment, engine, batch, survey, update. There are no ranks, no
snapshots and no exact sums, so the bits differ from those of a job; equal settings give equal bits.
"""

from __future__ import annotations

import copy
from collections import deque

import torch
from torch import Tensor, nn

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.loss.batch import TrainingBatch, collate
from holdfast.adapters.rl.rollout.engine import Engine
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.adapters.rl.training.assessment import TaskAssessment
from holdfast.adapters.rl.training.proximal import Ewma, Recomputed
from holdfast.adapters.rl.training.reference import ReferencePolicy
from holdfast.adapters.rl.training.survey import Survey, survey
from holdfast.adapters.rl.training.update import Update, make_optimizer
from holdfast.adapters.rl.weights.initial import build_policy

Weights = dict[str, Tensor]


class LaggedRun:
    """One run from a warmed-up policy, which it does not change."""

    def __init__(self, config: RLConfig, warmed: nn.Module) -> None:
        self._config = config
        self._assessment = TaskAssessment(config)
        self._model = copy.deepcopy(warmed)
        self._optimizer = make_optimizer(self._model.parameters(), lr=config.lr)
        self._engine = Engine(
            policy=build_policy(config),
            limits=config.limits,
            slots=config.slots,
            seed=config.seed,
            precision=config.rollout_precision,
        )
        self._versions = deque([self._weights()], maxlen=config.staleness + 1)
        self._proximal = self._make_proximal()
        kl = config.loss.kl
        self._reference = ReferencePolicy(copy.deepcopy(self._model), kl) if kl else None

    def held_out_curve(self) -> list[tuple[int, float]]:
        """Train; return the held-out exact match after each ``evaluate_every`` steps."""
        config, curve = self._config, list[tuple[int, float]]()
        for step in range(config.steps):
            if step % config.evaluate_every == 0:
                curve.append((step, self._evaluate()))
            self._step(step)
        return [*curve, (config.steps, self._evaluate())]

    def _make_proximal(self) -> Ewma | Recomputed | None:
        kind, config = self._config.loss.proximal, self._config
        if kind == "ewma":
            return Ewma(copy.deepcopy(self._model), self._model, decay=config.loss.ewma_decay)
        if kind == "recomputed":
            return Recomputed(build_policy(config), lambda _: self._versions[0])
        return None

    def _weights(self) -> Weights:
        return {name: p.detach().clone() for name, p in self._model.named_parameters()}

    def _evaluate(self) -> float:
        return self._assessment.shares(self._model)["held_out"]

    def _sample(self, step: int) -> list[Trajectory]:
        """Return the samples of a step, made with the version that its lag allows."""
        config, engine = self._config, self._engine
        version = max(0, step - config.staleness)
        engine.load(self._versions[0], version=version, generation=1)
        waiting = [
            Trajectory(ordinal=ordinal, sample=sample, prompt=self._prompt(ordinal))
            for ordinal in range(step * config.groups, (step + 1) * config.groups)
            for sample in range(config.group)
        ]
        done: list[Trajectory] = []
        while waiting or not engine.idle:
            while waiting and engine.free:
                engine.put(waiting.pop(0))
            done += engine.tick()
        engine.take_deltas()
        return sorted(done, key=lambda trajectory: trajectory.key)

    def _prompt(self, ordinal: int) -> tuple[int, ...]:
        return self._config.tokenizer.encode(self._assessment.prompt(ordinal))

    def _step(self, step: int) -> None:
        config, model = self._config, self._model
        samples = self._sample(step)
        rewards = torch.tensor([self._assessment.reward(sample) for sample in samples])
        batch = collate(samples, rewards, rows=config.rows, length=config.model.context).trimmed()
        found = self._survey(batch) if config.loss.surveys else None
        update = Update.of(batch, found, config=config, step=step)
        update.set_rate(self._optimizer)
        self._optimizer.zero_grad()
        update.loss(model, config=config).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        self._optimizer.step()
        if isinstance(self._proximal, Ewma):
            self._proximal.update()
        if self._reference is not None:
            self._reference.renew(self._model, version=step + 1)
        self._versions.append(self._weights())

    def _survey(self, batch: TrainingBatch) -> Survey:
        return survey(
            self._model,
            batch,
            microbatches=1,
            rank=0,
            ranks=1,
            sum_=lambda _: None,
            proximal=self._proximal,
            reference=self._reference,
        )
