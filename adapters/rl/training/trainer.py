"""The trainer: FSDP2 ranks that take batches from the ledger, under `elastic.resilient`.

A policy version is published by the snapshot after its step; nothing else is sent anywhere.
"""

from __future__ import annotations

import gc
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from holdfast import elastic
from holdfast.adapters.rl.balance.asking import RoleBalance
from holdfast.adapters.rl.balance.choosing import Balancer
from holdfast.adapters.rl.cast.part import begin_part
from holdfast.adapters.rl.config import ROLE, RLConfig
from holdfast.adapters.rl.ledger.checker import StepChecker, observe
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.loss.batch import TrainingBatch, collate, packed_shape
from holdfast.adapters.rl.policy.model import weights_hash
from holdfast.adapters.rl.policy.policy import full_tensors, parameter_names, shard
from holdfast.adapters.rl.policy.team import joined, state_of
from holdfast.adapters.rl.samples.borrowed import Borrowed
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory
from holdfast.adapters.rl.server.server import LedgerState, RolloutServer, Term, rollout_workers
from holdfast.adapters.rl.sharing.mailbox import GroupMailbox
from holdfast.adapters.rl.sharing.sharing import GroupSharing
from holdfast.adapters.rl.training.assessment import episode_figures, make_assessment
from holdfast.adapters.rl.training.learner import PolicyLearner, frozen_policies, make_learners
from holdfast.adapters.rl.training.proximal import Ewma
from holdfast.adapters.rl.training.recheck import row_at
from holdfast.adapters.rl.training.together import Cast, from_leader
from holdfast.adapters.rl.training.update import Update
from holdfast.adapters.rl.weights.places import RETAINED
from holdfast.adapters.rl.weights.pull import own_reader, published
from holdfast.adapters.rl.weights.retained import Retained
from holdfast.adapters.rl.weights.setup import Policies
from holdfast.ckpt import Rebuilt
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import JobFailedError
from holdfast.elastic.events import (
    RecheckSkipped,
    RolloutsAwaited,
    RuleViolated,
    SampleRechecked,
    TrainingHeld,
)

_WAIT_S = 0.05
_HELD_POLL_S = 0.01
_LOGGED_AS = {"held_out": "held_out", "greedy": "held_out_greedy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainerJob:
    """The objects that one generation trains with."""

    run: elastic.Run
    session: elastic.Session
    policies: dict[str, nn.Module]
    model: nn.Module
    learners: dict[str, PolicyLearner]
    ledger: Ledger
    checker: StepChecker
    history: dict[str, Any]
    retained: Retained | None
    sharing: GroupSharing | None
    cast: Cast | None


class Trainer:
    """The training function and its objects that live as long as the process.

    ``result``: the file that rank 0 writes the outcome to at the end.
    """

    def __init__(self, config: RLConfig, server: RolloutServer, *, result: Path | None) -> None:
        self._config, self._server, self._result = config, server, result
        self._balance = _balance(config)
        self._policies = Policies(config)
        self._assessment = make_assessment(config, self._policies)
        _import_early()

    def run(self) -> None:
        """Train to the end, through every change of the world."""
        config = self._config
        own = config if config.join is None else config.here[config.policy]
        resilient = elastic.resilient(
            mesh=elastic.Mesh(dp="auto", min_dp=own.min_dp, tp=own.tp),
            batch=elastic.Batch(microbatches=config.microbatches),
            snapshots=elastic.Snapshots(
                every=1, parity=config.parity, keep=config.keep, disk=config.disk
            ),
            checkpoint=config.root
            and elastic.Checkpoints(config.root, every=config.checkpoint_every),
            exact="float32",
            seed=config.seed,
            rehearse=False,  # terms of the rollout server begin before the first step
            worker_info=lambda: {"rollout": self._server.address, **self._frozen()},
        )
        resilient(self.train)()

    def train(self, run: elastic.Run) -> None:
        """Train in one generation (called again in the next)."""
        config = self._config
        learners = make_learners(run, config, self._policies.makers)
        policies = frozen_policies(config, self._policies.makers)
        policies |= {name: learner.model for name, learner in learners.items()}
        policies = {name: policies[name] for name in config.by_policy if name in policies}
        model = joined(policies)
        ledger, checker = (
            Ledger(config.plan, policies=[*config.by_policy], reward_of=self._reward),
            StepChecker(),
        )
        state = LedgerState(ledger, self._server)
        history: dict[str, Any] = {"reward": [], "held_out": [], "greedy": []}
        if config.policies:
            history["rewards"] = {name: [] for name in learners}
        retained = self._retained(run)
        more: dict[str, Any] = {}
        means = {
            name: each.proximal.module
            for name, each in learners.items()
            if isinstance(each.proximal, Ewma)
        }
        if means:
            more["ewma"] = joined(means)
        if retained is not None:
            more[RETAINED] = retained
        references = {
            name: each.reference for name, each in learners.items() if each.reference is not None
        }
        if references:
            more["reference"] = joined(references)
        if (frozen := self._policies.frozen_weights) is not None:
            more["frozen"] = Rebuilt(frozen)
        if (sharing := self._sharing(run)) is not None:
            more["sharing"] = sharing
        run.track(
            model=model,
            optimizer=state_of({name: each.optimizer for name, each in learners.items()}),
            ledger=state,
            checker=checker,
            history=history,
            **more,
        )
        counted = ("ledger", "checker", "history", *(more.keys() & {"sharing"}))
        elastic.session_of(run).count_on_leader(*counted)
        job = _TrainerJob(
            run=run,
            session=elastic.session_of(run),
            policies=policies,
            model=model,
            learners=learners,
            ledger=ledger,
            checker=checker,
            history=history,
            retained=retained,
            sharing=sharing,
            cast=Cast(run, config, self._policies.makers) if config.join is not None else None,
        )
        for reference in references.values():
            reference.require(run.completed)
        try:
            if run.is_leader:
                self._lead(job, state)
            for step in run.steps(config.steps):
                if step % config.evaluate_every == 0:
                    self._evaluate(job)
                self._step(job, step)
            self._finish(job)
        finally:
            self._server.retire()
            if job.cast is not None:
                job.cast.close()

    # -- beginning ---------------------------------------------------------------------------

    def _retained(self, run: elastic.Run) -> Retained | None:
        if not self._config.retained:
            return None
        makers, away = self._policies.makers, self._config.elsewhere
        versions = [
            {name: each.build() for name, each in makers.items() if name not in away}
            for _ in range(self._config.retained)
        ]
        for policies in versions:
            for name, policy in policies.items():
                if name not in self._config.frozen:
                    shard(policy, run.mesh)
        return Retained([joined(policies) for policies in versions])

    def _sharing(self, run: elastic.Run) -> GroupSharing | None:
        if (share := self._config.sharing) is None:
            return None

        def refuses(ordinal: int, prompt: Tokens) -> str:
            is_ours = prompt == self._prompt(ordinal)
            return "" if is_ours else f"its prompt is not prompt {ordinal} of this job's task"

        return GroupSharing(
            share,
            mailbox=GroupMailbox.at(share.meet),
            group=self._config.group,
            context=self._config.model.context,
            emit=elastic.session_of(run).emit,
            refuses=refuses,
        )

    def _frozen(self) -> dict[str, Json]:
        """Return the digest of the frozen weights, if any, for the rollout workers."""
        digest = self._policies.frozen
        return {} if digest is None else {"frozen": digest}

    def _lead(self, job: _TrainerJob, state: LedgerState) -> None:
        run, ledger, session = job.run, job.ledger, job.session
        ledger.resume(run.generation, restored=run.completed)
        names = parameter_names(job.model)
        term = Term(
            generation=run.generation,
            ledger=ledger,
            prompt_of=self._prompt,
            alive=lambda: rollout_workers(session.roster()),
            logs=session.sidecar,
            emit=session.emit,
            began=time.monotonic(),
            digest_of=lambda place: published(names, place, reader=own_reader(run)),
        )
        if job.cast is not None:
            job.cast.part = begin_part(
                run,
                self._config,
                self._server,
                ledger=ledger,
                names=names,
                frozen=self._policies.frozen,
                prompt_of=self._prompt,
            )
        if self._balance is not None:
            self._balance.begin(session)
        self._server.lead(term, former=state.workers)

    # -- one step ----------------------------------------------------------------------------

    def _step(self, job: _TrainerJob, step: int) -> None:
        """Train every policy on its tokens; the step's snapshot has all of them."""
        run, logged = job.run, dict[str, float]()
        for name, whole in self._batches(job, step).items():
            learner, batch = job.learners[name], whole.trimmed()
            update = learner.learn(batch, step=step)
            if job.retained is not None and not logged:  # before the first of them changes
                run.fence()
                job.retained.keep(job.model, version=step)
            learner.apply(step=step)
            logged |= self._figures(job, learner, batch, update)
        run.log(**logged)

    def _figures(
        self, job: _TrainerJob, learner: PolicyLearner, batch: TrainingBatch, update: Update
    ) -> dict[str, float]:
        """Note a policy's reward; return what is logged of it, under its name if it has one."""
        used, step = batch.used, update.step
        reward = batch.rewards[used].double().mean().item() if used.any() else 0.0
        if self._config.policies:
            job.history["rewards"][learner.name].append(reward)
        else:
            job.history["reward"].append(reward)
        staleness = step - min(batch.sampled_by, default=step)
        found = {"reward": reward, "tokens": batch.token_count, "staleness": staleness}
        if update.share is not None:
            found["effective_share"] = update.share
        if update.divergence is not None:
            found["divergence"] = update.divergence
        return {f"{key}_{learner.name}" if learner.name else key: found[key] for key in found}

    def _batches(self, job: _TrainerJob, step: int) -> dict[str, TrainingBatch]:
        """Return the batch of ``step`` of each policy: rank 0 waits for it and sends it to all."""
        config, run, began = self._config, job.run, time.perf_counter()
        if job.cast is not None:
            job.cast.await_groups(step)
        found = self._gather(job, step, began=began) if run.is_leader else {}
        batches: dict[str, TrainingBatch] = {}
        for name in job.learners:
            shape = packed_shape(config.rows, config.model.context)
            packed = torch.zeros(shape, dtype=torch.float64)
            if name in found:
                packed.copy_(found[name].pack())
            from_leader(run, packed)
            batches[name] = TrainingBatch.unpack(packed)
        return batches

    def _gather(self, job: _TrainerJob, step: int, *, began: float) -> dict[str, TrainingBatch]:
        config, run, ledger = self._config, job.run, job.ledger
        session = job.session
        protected = session.sidecar.protected_step(generation=run.generation)
        part = job.cast.part if job.cast is not None else None
        admitted_by = step if part is None else part.admitted_by
        self._server.advance(admitted_by, protected=max(0, protected))
        samples = None
        while samples is None:
            run.check()
            samples = self._server.wait_batch(step, timeout_s=_WAIT_S)
        waited_s = time.perf_counter() - began
        session.emit(RolloutsAwaited(step=step + 1, seconds=waited_s))
        if part is not None:
            part.publish(step, samples)
        self._await_release(job, step)
        rewards = [self._reward(sample) for sample in samples]
        island = job.sharing.share.name if job.sharing else ""
        with self._server.lock:
            others = ledger.borrowing.due(step)
            both = [*samples, *others]
            consumers = self._server.consumers()
            seen = observe(ledger, step, both, consumers=consumers, island=island)
            tail = self._server.train(step, samples, rewards)
            if job.sharing is not None:
                job.sharing.settle(
                    step, ledger, samples=samples, borrowed=others, protected=protected
                )
        session.emit(tail)
        if self._balance is not None:
            self._balance.step(
                now_s=time.perf_counter(),
                waited_s=waited_s,
                working=tail.working,
                left=config.steps - step,
            )
        if config.environment is not None and samples:
            session.emit(episode_figures(samples, step=step + 1))
        self._judge(job, step, job.checker.check(seen))
        rewards += [self._reward(sample) for sample in others]
        if config.policies:
            mean = sum(rewards) / len(rewards) if rewards else 0.0
            job.history["reward"].append(mean)
        both = [*samples, *(_as_ours(sample, run.generation, step) for sample in others)]
        batches = {
            name: self._collated(both, speaker=each.speaker) for name, each in job.learners.items()
        }
        self._look_again(job, step, batches, samples)
        return batches

    def _collated(self, samples: Sequence[Trajectory], *, speaker: int) -> TrainingBatch:
        return collate(
            samples,
            torch.tensor([self._reward(sample, speaker=speaker) for sample in samples]),
            rows=self._config.rows,
            length=self._config.model.context,
            speaker=speaker,
        )

    def _look_again(
        self,
        job: _TrainerJob,
        step: int,
        batches: Mapping[str, TrainingBatch],
        samples: Sequence[Trajectory],
    ) -> None:
        """Recompute the log-probabilities of one row, in the steps that are due."""
        session, check = job.session, self._config.check
        row = row_at(step, every=check.recompute_every, rows=len(samples))
        if row is None:
            return
        began, key = time.perf_counter(), samples[row].key
        try:
            difference = max(
                job.learners[name].recheck.difference(batch, row) for name, batch in batches.items()
            )
        except CkptError as error:
            session.emit(RecheckSkipped(step=step + 1, why=str(error)))
            return
        seconds = time.perf_counter() - began
        session.emit(SampleRechecked(step=step + 1, difference=difference, seconds=seconds))
        found = job.checker.recomputed(key, difference, tolerance=check.tolerance)
        self._judge(job, step, found)

    def _judge(self, job: _TrainerJob, step: int, found: Sequence[str]) -> None:
        """Report violations; end the job if ``check.fatal`` is set."""
        for what in found:
            job.session.emit(RuleViolated(step=step + 1, what=what))
        if found and self._config.check.fatal:
            raise JobFailedError(f"{found[0]} (check.fatal is set)")

    def _reward(self, sample: Trajectory, *, speaker: int | None = None) -> float:
        """Return the reward of a finished sample, less the penalty for its length.

        With ``speaker`` it is that policy's, where the environment gave each its own.
        """
        limits = self._config.limits
        most = min(limits.max_new_tokens, limits.context - len(sample.prompt))
        penalty = self._config.length.of(sample.sampled, most=most)
        own = None if speaker is None else sample.reward_of(speaker)
        return (self._assessment.reward(sample) if own is None else own) - penalty

    def _prompt(self, ordinal: int) -> Tokens:
        return self._config.tokenizer.encode(self._assessment.prompt(ordinal))

    def _await_release(self, job: _TrainerJob, step: int) -> None:
        """Wait while the job is held: as long as the file ``hold`` exists."""
        hold, began = self._config.hold, time.perf_counter()
        if hold is None or not Path(hold).exists():
            return
        while Path(hold).exists():
            job.run.check()
            time.sleep(_HELD_POLL_S)
        job.session.emit(TrainingHeld(step=step + 1, seconds=time.perf_counter() - began))

    # -- evaluation and end ------------------------------------------------------------------

    def _evaluate(self, job: _TrainerJob) -> None:
        run, history = job.run, job.history
        if job.cast is None:
            found = self._assessment.evaluate(run, job.policies, {})
        else:
            found = job.cast.evaluate(self._assessment, job.policies)
        for name, share in found.items():
            history[name].append([run.completed, share])
        if found:
            run.log(**{_LOGGED_AS[name]: share for name, share in found.items()})

    def _finish(self, job: _TrainerJob) -> None:
        self._evaluate(job)
        run, ledger, history = job.run, job.ledger, job.history
        digest = weights_hash(full_tensors(job.model))
        if job.cast is not None:
            job.cast.await_end()
        if not run.is_leader:
            return
        self._server.finish()
        with self._server.lock:
            violations = [*ledger.check(), *job.checker.violations]
            outcome = {
                "final_hash": digest,
                "steps": run.completed,
                "reward": history["reward"],
                "heldout": history["held_out"],
                "heldout_greedy": history["greedy"],
                "ledger": {
                    **msgspec.to_builtins(ledger.counters),
                    "ordinals": ledger.counts(),
                    "ok": not violations,
                    "violations": violations,
                },
                "violations": violations,
                "staleness_max": ledger.staleness_max,
                "replay": {str(times): groups for times, groups in ledger.uses.items()},
            }
            if self._config.policies:
                outcome |= {"rewards": history["rewards"], "policies": ledger.books.report()}
        if self._result is not None:
            write_result(self._result, outcome)
        if job.cast is not None and job.cast.part is not None:
            job.cast.part.end()


def _balance(config: RLConfig) -> RoleBalance | None:
    if config.balance is None:
        return None
    return RoleBalance(Balancer(shape=config.shape, settings=config.balance), role=ROLE)


def _import_early() -> None:
    """Import the modules of the first optimizer (1 s) before this worker is ready."""
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    gc.collect()  # before the loop hides what is left from the collector


def write_result(path: Path, outcome: dict[str, Json]) -> None:
    """Replace ``path`` by the outcome atomically."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=1))
    draft.replace(path)


def _as_ours(sample: Borrowed, generation: int, step: int) -> Trajectory:
    """Return a borrowed sample without the versions of its own run, which say nothing here."""
    stamp = Stamp(generation=generation, version=step, count=sample.sampled)
    return msgspec.structs.replace(sample, stamps=(stamp,))
