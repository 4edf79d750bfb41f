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
import torch.distributed as dist
from torch import Tensor, nn

from holdfast import elastic
from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.ledger.checker import StepChecker, observe
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.loss.batch import TrainingBatch, collate, packed_shape
from holdfast.adapters.rl.loss.divergence import KLConfig
from holdfast.adapters.rl.policy.model import weights_hash
from holdfast.adapters.rl.policy.policy import Policy, full_tensors, parameter_names, reshard, shard
from holdfast.adapters.rl.samples.borrowed import Borrowed
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Stamp, Trajectory
from holdfast.adapters.rl.server.server import LedgerState, RolloutServer, Term, rollout_workers
from holdfast.adapters.rl.sharing.mailbox import GroupMailbox
from holdfast.adapters.rl.sharing.sharing import GroupSharing
from holdfast.adapters.rl.training.assessment import episode_figures, make_assessment
from holdfast.adapters.rl.training.proximal import Ewma, Recomputed
from holdfast.adapters.rl.training.recheck import Recheck, row_at
from holdfast.adapters.rl.training.reference import ReferencePolicy
from holdfast.adapters.rl.training.survey import Survey, survey
from holdfast.adapters.rl.training.update import Update, make_optimizer
from holdfast.adapters.rl.weights.places import RETAINED
from holdfast.adapters.rl.weights.pull import own_reader, published, weights_of
from holdfast.adapters.rl.weights.retained import Retained
from holdfast.adapters.rl.weights.setup import Policies
from holdfast.adapters.rl.weights.warm_up import load_reference, load_warm_start
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
_RECHECK_LIMIT_S = 2.0
_LOGGED_AS = {"held_out": "held_out", "greedy": "held_out_greedy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainerJob:
    """The objects that one generation trains with."""

    run: elastic.Run
    session: elastic.Session
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ledger: Ledger
    checker: StepChecker
    recheck: Recheck
    history: dict[str, list[Json]]
    proximal: Ewma | Recomputed | None
    reference: ReferencePolicy | None
    retained: Retained | None
    sharing: GroupSharing | None


class Trainer:
    """The training function and its objects that live as long as the process.

    ``result``: the file that rank 0 writes the outcome to at the end.
    """

    def __init__(self, config: RLConfig, server: RolloutServer, *, result: Path | None) -> None:
        self._config, self._server, self._result = config, server, result
        self._policies = Policies(config)
        self._assessment = make_assessment(config, self._policies)
        _import_early()

    def run(self) -> None:
        """Train to the end, through every change of the world."""
        config = self._config
        resilient = elastic.resilient(
            mesh=elastic.Mesh(dp="auto", min_dp=config.min_dp, tp=config.tp),
            batch=elastic.Batch(microbatches=config.microbatches),
            snapshots=elastic.Snapshots(
                every=1, parity=config.parity, keep=config.keep, disk=config.disk
            ),
            checkpoint=config.checkpoint
            and elastic.Checkpoints(config.checkpoint, every=config.checkpoint_every),
            exact="float32",
            seed=config.seed,
            rehearse=False,  # terms of the rollout server begin before the first step
            worker_info=lambda: {"rollout": self._server.address, **self._frozen()},
        )
        resilient(self.train)()

    def train(self, run: elastic.Run) -> None:
        """Train in one generation (called again in the next)."""
        config = self._config
        model = self._build(run)
        optimizer = make_optimizer(model.parameters(), lr=config.lr)
        ledger, checker = Ledger(config.plan, reward_of=self._reward), StepChecker()
        state = LedgerState(ledger, self._server)
        history: dict[str, list[Json]] = {"reward": [], "held_out": [], "greedy": []}
        proximal, retained = self._proximal(run, model), self._retained(run)
        more: dict[str, Any] = {"ewma": proximal.module} if isinstance(proximal, Ewma) else {}
        if retained is not None:
            more[RETAINED] = retained
        if (reference := self._reference(run)) is not None:
            more["reference"] = reference
        if (frozen := self._policies.frozen_weights) is not None:
            more["frozen"] = Rebuilt(frozen)
        if (sharing := self._sharing(run)) is not None:
            more["sharing"] = sharing
        run.track(
            model=model,
            optimizer=optimizer,
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
            model=model,
            optimizer=optimizer,
            ledger=ledger,
            checker=checker,
            recheck=self._recheck(run, model),
            history=history,
            proximal=proximal,
            reference=reference,
            retained=retained,
            sharing=sharing,
        )
        if reference is not None:
            reference.require(run.completed)
        try:
            if run.is_leader:
                self._lead(run, model, ledger, state)
            for step in run.steps(config.steps):
                if step % config.evaluate_every == 0:
                    self._evaluate(job)
                self._step(job, step)
            self._finish(job)
        finally:
            self._server.retire()

    # -- beginning ---------------------------------------------------------------------------

    def _build(self, run: elastic.Run, *, reference: KLConfig | None = None) -> Policy:
        """Return a sharded policy with the first weights of the run, or those of a reference."""
        config = self._config
        model = self._policies.build()
        if config.lora is None and not _restores(run):
            if reference is not None and reference.checkpoint is not None:
                load_reference(model, reference.checkpoint, step=reference.step)
            elif config.warm_start is not None:
                load_warm_start(model, config.warm_start)
        shard(model, run.mesh)
        return model

    def _proximal(self, run: elastic.Run, model: nn.Module) -> Ewma | Recomputed | None:
        kind, config = self._config.loss.proximal, self._config
        if kind == "ewma":
            mean = self._build(run)
            return Ewma(mean, model, decay=config.loss.ewma_decay)
        if kind == "recomputed":
            names = parameter_names(model)
            retained = config.retained
            return Recomputed(
                self._policies.build(),
                lambda version: weights_of(run, names, version, retained=retained),
            )
        return None

    def _reference(self, run: elastic.Run) -> ReferencePolicy | None:
        if (kl := self._config.loss.kl) is None:
            return None
        return ReferencePolicy(self._build(run, reference=kl), kl)

    def _retained(self, run: elastic.Run) -> Retained | None:
        if not self._config.retained:
            return None
        policies = [self._policies.build() for _ in range(self._config.retained)]
        for policy in policies:
            shard(policy, run.mesh)
        return Retained(policies)

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

    def _recheck(self, run: elastic.Run, model: nn.Module) -> Recheck:
        names, retained = parameter_names(model), self._config.retained

        def weights(version: int) -> Mapping[str, Tensor]:
            return weights_of(run, names, version, limit_s=_RECHECK_LIMIT_S, retained=retained)

        return Recheck(self._policies.build, weights, precision=self._config.rollout_precision)

    def _frozen(self) -> dict[str, Json]:
        """Return the digest of the frozen weights, if any, for the rollout workers."""
        digest = self._policies.frozen
        return {} if digest is None else {"frozen": digest}

    def _lead(self, run: elastic.Run, model: nn.Module, ledger: Ledger, state: LedgerState) -> None:
        ledger.resume(run.generation, restored=run.completed)
        names, session = parameter_names(model), elastic.session_of(run)
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
        self._server.lead(term, former=state.workers)

    # -- one step ----------------------------------------------------------------------------

    def _step(self, job: _TrainerJob, step: int) -> None:
        config, run = self._config, job.run
        batch = self._batch(job, step).trimmed()
        found = self._survey(job, batch) if config.loss.surveys else None
        update = Update.of(batch, found, config=config, step=step)
        update.set_rate(job.optimizer)
        for index in run.microbatches():
            run.backward(update.loss(job.model, config=config, index=index, of=config.microbatches))
        run.clip_grad_norm_(job.model.parameters(), config.max_norm)
        if job.retained is not None:
            run.fence()
            job.retained.keep(job.model, version=step)
        run.step(job.optimizer)
        if isinstance(job.proximal, Ewma):
            job.proximal.update()
        if job.reference is not None:
            job.reference.renew(job.model, version=step + 1)
        used, tokens = batch.used, batch.token_count
        reward = batch.rewards[used].double().mean().item() if used.any() else 0.0
        staleness = step - min(batch.sampled_by, default=step)
        job.history["reward"].append(reward)
        more = {} if update.share is None else {"effective_share": update.share}
        more |= {} if update.divergence is None else {"divergence": update.divergence}
        run.log(reward=reward, tokens=tokens, staleness=staleness, **more)

    def _survey(self, job: _TrainerJob, batch: TrainingBatch) -> Survey:
        data = job.run.data_mesh
        try:
            return survey(
                job.model,
                batch,
                microbatches=self._config.microbatches,
                rank=data.get_local_rank(),
                ranks=data.size(),
                sum_=lambda found: dist.all_reduce(found, group=data.get_group()),
                proximal=job.proximal,
                reference=job.reference,
            )
        finally:
            reshard(job.model)

    def _batch(self, job: _TrainerJob, step: int) -> TrainingBatch:
        """Return the batch of ``step``: rank 0 waits for it and sends it to all."""
        config, run = self._config, job.run
        length = config.model.context
        packed = torch.zeros(packed_shape(config.rows, length), dtype=torch.float64)
        if run.is_leader:
            packed.copy_(self._gather(job, step).pack())
        for axis in range(run.mesh.ndim):  # the leader is the first along each
            dist.broadcast(packed, group=run.mesh.get_group(axis), group_src=0)
        return TrainingBatch.unpack(packed)

    def _gather(self, job: _TrainerJob, step: int) -> TrainingBatch:
        config, run, ledger = self._config, job.run, job.ledger
        session = job.session
        protected = session.sidecar.protected_step(generation=run.generation)
        self._server.advance(step, protected=max(0, protected))
        samples, began = None, time.perf_counter()
        while samples is None:
            run.check()
            samples = self._server.wait_batch(step, timeout_s=_WAIT_S)
        session.emit(RolloutsAwaited(step=step + 1, seconds=time.perf_counter() - began))
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
        if config.environment is not None and samples:
            session.emit(episode_figures(samples, step=step + 1))
        self._judge(job, step, job.checker.check(seen))
        length = config.model.context
        rewards += [self._reward(sample) for sample in others]
        both = [*samples, *(_as_ours(sample, run.generation, step) for sample in others)]
        batch = collate(both, torch.tensor(rewards), rows=config.rows, length=length)
        self._look_again(job, step, batch, samples)
        return batch

    def _look_again(
        self, job: _TrainerJob, step: int, batch: TrainingBatch, samples: Sequence[Trajectory]
    ) -> None:
        """Recompute the log-probabilities of one row, in the steps that are due."""
        session, check = job.session, self._config.check
        row = row_at(step, every=check.recompute_every, rows=len(samples))
        if row is None:
            return
        began, key = time.perf_counter(), samples[row].key
        try:
            difference = job.recheck.difference(batch, row)
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

    def _reward(self, sample: Trajectory) -> float:
        """Return the reward of a finished sample, less the penalty for its length."""
        limits = self._config.limits
        most = min(limits.max_new_tokens, limits.context - len(sample.prompt))
        penalty = self._config.length.of(sample.sampled, most=most)
        return self._assessment.reward(sample) - penalty

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
        found = self._assessment.evaluate(run, job.model)
        for name, share in found.items():
            history[name].append([run.completed, share])
        run.log(**{_LOGGED_AS[name]: share for name, share in found.items()})

    def _finish(self, job: _TrainerJob) -> None:
        self._evaluate(job)
        run, ledger, history = job.run, job.ledger, job.history
        digest = weights_hash(full_tensors(job.model))
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
        if self._result is not None:
            write_result(self._result, outcome)


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


def _restores(run: elastic.Run) -> bool:
    """Say whether the generation starts from a snapshot, so that initial weights do not matter."""
    record = elastic.session_of(run).roster().generation
    return record is not None and record.number == run.generation and record.restore is not None
