"""The ledger, the token logs and the published weights for a user-written training loop.

`Rollouts` belongs to a loop under `elastic.resilient` and is tracked with the model, so the ledger
and the weights are one consistent cut. Rank 0 samples, with any sampling code. The tokens it adds
to a `Sample` are in a log of its node's sidecar, with copies on other nodes, and come back after
the loss of the process or the node. Every prompt is trained once. Alternatively, user-written
processes sample; they attach to the work that `Rollouts.serve` offers
(`holdfast.adapters.rl.sampler_process`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from torch import Tensor, nn

from holdfast import elastic
from holdfast.adapters.rl.ledger.checker import Consumer, ObservedStep, StepChecker, observe
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import Assignment, BatchPlan, Mode
from holdfast.adapters.rl.rollout.episode import Episode
from holdfast.adapters.rl.samples.borrowed import Borrowed
from holdfast.adapters.rl.samples.sample import Sample
from holdfast.adapters.rl.samples.token_log import TokenLog
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Delta, SampleId, Trajectory, TurnLimits
from holdfast.adapters.rl.samples.unlogged import Unlogged
from holdfast.adapters.rl.server.meeting import Meeting
from holdfast.adapters.rl.server.messages import WorkerIdentity
from holdfast.adapters.rl.server.salvage import read_log, take_over
from holdfast.adapters.rl.server.server import LedgerState
from holdfast.adapters.rl.server.serving import Serving
from holdfast.adapters.rl.sharing.mailbox import GroupMailbox
from holdfast.adapters.rl.sharing.settings import Share
from holdfast.adapters.rl.sharing.sharing import GroupSharing, scored
from holdfast.adapters.rl.weights.pull import weights_of
from holdfast.adapters.shared.broadcasting import from_leader
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.elastic.events import RuleViolated, SampledUnprotected

__all__ = [
    "BatchPlan",
    "Borrowed",
    "Episode",
    "Mode",
    "Rollouts",
    "Sample",
    "Share",
    "Trajectory",
    "TurnLimits",
]

_log = logging.getLogger(__name__)

_LOG_LIMIT_S = 3.0
_PUBLISH_LIMIT_S = 5.0
_POLL_S = 0.05
_MOST = 1 << 20

_Samples: TypeAlias = tuple[list[Trajectory], list[Borrowed]]
"""The samples of a step: this run's own, and those of others."""


class Rollouts:
    """The prompts of a training loop: each is trained once, in order, with all of its samples.

    Make one in each generation and track it with the model, by any name. ``prompt_of`` gives the
    tokens of a prompt by its ordinal; ``plan`` says how many prompts and samples a step has. Tokens
    are logged, in well under a millisecond, when ``log_every_tokens`` have accumulated or a sample
    is finished; a loss of the process costs the unlogged ones. The loop must snapshot every step: a
    sample belongs to a policy version, and is rolled back with it. Every step is checked
    by the rules of the ledger; with ``fatal`` a violation ends the job.

    With ``share`` each step has ``share.own`` groups of the plan's prompts, and up to
    ``share.others`` groups that other runs sampled. A run that is restored trains on the same ones.

    ``reward_of`` gives the reward of a finished sample, and must depend on nothing else. Only a
    plan with ``skip_equal`` needs it: groups whose rewards are all equal are passed over.

    With ``TurnLimits(turns=True)`` in the plan each sample is an `Episode`, of several turns.
    ``policies`` are the names of those that speak in them, if there are several. All are tracked
    as one model and have one version, and the ledger counts the tokens of each.
    """

    def __init__(
        self,
        run: elastic.Run,
        plan: BatchPlan,
        prompt_of: Callable[[int], Tokens],
        *,
        log_every_tokens: int = 1,
        fatal: bool = False,
        share: Share | None = None,
        reward_of: Callable[[Trajectory], float] | None = None,
        policies: Sequence[str] = (),
    ) -> None:
        if log_every_tokens < 1:
            raise ConfigError(f"log_every_tokens is {log_every_tokens}, needed: at least 1")
        if plan.skips and reward_of is None:
            raise ConfigError(
                "Scheduling(skip_equal=...) passes over groups by their rewards: give Rollouts "
                "reward_of, or set skip_equal to None"
            )
        _check_turns(plan, policies, shares=share is not None)
        if share is not None:
            share.check_groups(plan.groups)
            plan = msgspec.structs.replace(plan, groups=share.own)
        self.policies = tuple(policies) or ("",)
        self.ledger = Ledger(plan, policies=self.policies, reward_of=reward_of)
        self.checker = StepChecker()
        self.lock: AbstractContextManager[Any] = nullcontext()  # one thread uses the ledger
        self._serving: Serving | None = None
        self._served: Callable[[], Serving] | None = None
        self._run, self._prompt_of = run, prompt_of
        self._fatal = fatal
        self._session = session = elastic.session_of(run)
        member = session.members[run.rank]
        self._worker = WorkerIdentity(
            seat=member.seat, incarnation=member.incarnation, node=member.node
        )
        self._state = LedgerState(self.ledger, self)
        self._log = TokenLog(lambda: session.sidecar, self._worker.log)
        self._open: dict[SampleId, Sample] = {}
        self._unlogged = Unlogged(
            log_every_tokens, lambda deltas: self._log.append(deltas, self._trajectories)
        )
        self._began, self._wait_s, self._inherited = False, _PUBLISH_LIMIT_S, 0
        self._score = share.score if share else None
        self._sharing: GroupSharing | None = None
        if share is not None:
            self._sharing = GroupSharing(
                share,
                mailbox=GroupMailbox.at(share.meet),
                group=plan.group,
                context=plan.limits.context,
                emit=session.emit,
            )

    # -- the loop's side -------------------------------------------------------------------------

    def samples(self) -> Iterator[Sample]:
        """Yield, on rank 0, every unfinished sample that the plan admits now.

        First waits until the present policy version is protected, so that its samples cannot be
        rolled back by a loss that the parity covers.
        """
        if self._served is not None:
            raise ConfigError(
                "serve() lets other processes sample: samples() cannot be used beside it"
            )
        if not self._run.is_leader:
            return
        self._begin()
        self.ledger.admit(self._run.completed, self._prompt_of)
        self._release(self._await_published())
        for sample in list(self._open.values()):
            sample.version = self._version(sample.ordinal)
            yield sample
        while work := self._claim():
            for assignment in work:
                start = assignment.trajectory
                sample = self._begun(start)
                self._open[start.key] = sample
                yield sample

    def _begun(self, start: Trajectory) -> Sample:
        version = self._version(start.ordinal)
        if self.limits.turns:
            return Episode(self, start, version=version, policies=self.policies)
        return Sample(self, start, version=version)

    def _claim(self) -> list[Assignment]:
        """Claim all that may be sampled now; pass over groups if nothing else is left."""
        worker = self._worker.incarnation
        work = self.ledger.claim(worker, free=_MOST, version=None)
        if not work and self.ledger.plan.skips:
            self._complete(self._run.completed)
            work = self.ledger.claim(worker, free=_MOST, version=None)
        return work

    def _complete(self, step: int) -> list[Trajectory] | None:
        """Return the samples of a step that are this process's own, None while some are missing."""
        found = self.ledger.batch(step)
        if self.ledger.stuck:
            raise JobFailedError(self.ledger.stuck)
        return found

    def batch(self) -> list[Trajectory]:
        """Return the samples of the present step, in order, and mark them as trained. Collective.

        Those of other runs (`Borrowed`) come last, group by group. Within `serve` it waits for its
        own. Otherwise it raises ``ConfigError`` while some are not finished.
        """
        step, payload = self._run.completed, b""
        if self._run.is_leader:
            found, seen = self._sampled(step) if self._served is None else self._gathered(step)
            self._judge(step, self.checker.check(seen))
            payload = msgspec.json.encode(found)
        own, others = msgspec.json.decode(
            from_leader(self._run, payload), type=tuple[list[Trajectory], list[Borrowed]]
        )
        return [*own, *(scored(sample, self._score) for sample in others)]

    @contextmanager
    def serve(
        self, directory: str | Path, model: nn.Module, *, silence_s: float = 60.0
    ) -> Iterator[None]:
        """Let user-written processes sample while the ``with`` block lasts.

        They find this loop by the ``directory`` (see `holdfast.rl.attach`), which only they and the
        ranks should be able to read, and pull the weights of ``model``, which is tracked as
        ``model``. The end of a process is noticed at once, and its samples are given to others; a
        process that only falls silent counts as lost after ``silence_s``. Enter it on all ranks,
        after `Run.track`.
        """
        self._served = partial(
            Serving, self._run, directory=directory, model=model, silence_s=silence_s
        )
        try:
            yield
            if self._serving is not None:
                self._serving.finish()
            elif self._run.is_leader:
                Meeting(directory).end()  # all steps were made before
        finally:
            if self._serving is not None:
                self._serving.close()

    def weights(self, names: Iterable[str], version: int) -> Mapping[str, Tensor]:
        """Return parameters of the model tracked as ``model``, as they were in ``version``.

        The versions of the newest ``keep`` snapshots are available (see `elastic.Snapshots`).
        Raises ``CkptError`` for others.
        """
        return weights_of(self._run, names, version)

    def report(self) -> dict[str, Json]:
        """Return the counts of prompts, samples and tokens, and every violation found.

        With ``policies`` also the trained turns and tokens of each.
        """
        several = {"policies": self.ledger.books.report()} if any(self.policies) else {}
        return {
            **msgspec.to_builtins(self.ledger.counters),
            "ordinals": self.ledger.counts(),
            **several,
            "violations": [*self.ledger.check(), *self.checker.violations],
        }

    # -- the state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Json]:
        """Return the ledger (unfinished tokens are in the logs) and the checker's state.

        With ``share`` also the groups that wait to be published.
        """
        shared = {"sharing": self._sharing.state_dict()} if self._sharing else {}
        return {**self._state.state_dict(), "checker": self.checker.state_dict(), **shared}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Replace everything by what ``state_dict`` returned."""
        self._state.load_state_dict(state)
        self.checker.load_state_dict(state["checker"])
        if self._sharing is not None and "sharing" in state:
            self._sharing.load_state_dict(state["sharing"])

    def workers(self) -> tuple[WorkerIdentity, ...]:
        """Return the workers whose logs may have samples that are not trained and protected."""
        if self._serving is not None:
            return self._serving.server.workers()
        own = self._worker
        return (*(each for each in self._state.workers if each != own), own)

    # -- a sample's side -------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """Seed of the noise that picks tokens: the run's."""
        return self._session.seed

    @property
    def generation(self) -> int:
        """The run's generation."""
        return self._run.generation

    @property
    def limits(self) -> TurnLimits:
        """The limits that end an answer: the plan's."""
        return self.ledger.plan.limits

    def added(self, sample: Sample, delta: Delta) -> None:
        """Log tokens added to a sample, with earlier unlogged ones; deliver a finished sample."""
        if sample.finished:
            self.ledger.deliver(sample.trajectory())
            self._open.pop((sample.ordinal, sample.sample), None)
        self._unlogged.add(delta, finished=sample.finished or bool(delta.turns))

    def together(self) -> AbstractContextManager[None]:
        """Return a block whose tokens are logged at its end, by one record."""
        return self._unlogged.together()

    # -- inside ----------------------------------------------------------------------------------

    def _sampled(self, step: int) -> tuple[_Samples, ObservedStep]:
        """Return the samples of a step that this process has, and the ledger's state before it."""
        self._begin()
        found = self._complete(step)
        if found is None:
            again = " when asked again" if self.ledger.plan.skips else ""
            raise ConfigError(
                f"samples of step {step} are not finished: finish all that samples() yields{again}"
            )
        own = Consumer(name=self._worker.seat, generation=self.generation, version=step)
        samples = found, self.ledger.borrowing.due(step)
        seen = self._observed(step, samples, [own])
        self.ledger.train(step)
        self._settle(step, samples)
        return samples, seen

    def _gathered(self, step: int) -> tuple[_Samples, ObservedStep]:
        """Return the other processes' samples of a step, and the ledger's state before it."""
        serving = self._serving or self._begin_serving()
        found = serving.gather(step)
        with self.lock:
            samples = found, self.ledger.borrowing.due(step)
            seen = self._observed(step, samples, serving.server.consumers())
            serving.train(step, found)
            self._settle(step, samples)
        return samples, seen

    def _observed(
        self, step: int, samples: _Samples, consumers: Iterable[Consumer]
    ) -> ObservedStep:
        own, others = samples
        island = self._sharing.share.name if self._sharing else ""
        return observe(self.ledger, step, [*own, *others], consumers=consumers, island=island)

    def _settle(self, step: int, samples: _Samples) -> None:
        """Share the groups of a step, and record what the next one borrows."""
        if self._sharing is not None:
            own, others = samples
            self._sharing.settle(
                step, self.ledger, samples=own, borrowed=others, protected=self._protected()
            )

    def _protected(self) -> int:
        """Return the newest protected step, -1 while none is known."""
        try:
            return self._session.sidecar.protected_step(generation=self._run.generation)
        except CkptError:
            return -1

    def _begin_serving(self) -> Serving:
        """Offer work, at the first batch: a rehearsal, which gets no further, offers none."""
        assert self._served is not None
        serving = self._serving = self._served()
        self.lock = serving.server.lock
        serving.begin(self.ledger, self._prompt_of, former=self._state.workers)
        return serving

    def _version(self, ordinal: int) -> int:
        is_pinned = self.ledger.plan.pinned
        return self.ledger.oldest(ordinal) if is_pinned else self._run.completed

    def _trajectories(self) -> Iterator[Trajectory]:
        """Yield the trajectories of all open samples, for a log that starts anew."""
        open_ = {key: sample.trajectory() for key, sample in self._open.items()}
        yield from open_.values()
        yield from (each for each in self.ledger.samples() if each.key not in open_)

    def _begin(self) -> None:
        """Once in a generation: salvage the logs of earlier workers, and this process's own."""
        if self._began:
            return
        self._began, run, ledger = True, self._run, self.ledger
        session = self._session
        ledger.resume(run.generation, restored=run.completed)
        ledger.admit(run.completed, self._prompt_of)
        self._inherited = ledger.admitted
        for worker in self._state.workers:
            pieces = read_log(session.sidecar, worker, limit_s=_LOG_LIMIT_S, over=lambda: False)
            if worker != self._worker:
                ledger.lose(worker.incarnation)
            found = take_over(ledger, pieces, unfinished=frozenset(), reported={})
            session.emit(found.event(worker.seat))
        self._log.append([], self._trajectories)

    def _await_published(self) -> int:
        """Wait until the present version is protected; return the newest protected step.

        If none is protected for long (without snapshots, for example), later calls do not wait.
        """
        run, reached = self._run, -1
        deadline_s = time.monotonic() + self._wait_s
        while reached < run.completed:
            run.check()
            try:
                reached = self._session.sidecar.protected_step(
                    generation=run.generation, at_least=run.completed, timeout_s=_POLL_S
                )
            except CkptError:
                time.sleep(_POLL_S)
            if reached < run.completed and time.monotonic() > deadline_s:
                self._wait_s = 0.0
                self._session.emit(SampledUnprotected(step=run.completed, protected=reached))
                break
        return reached

    def _judge(self, step: int, found: Sequence[str]) -> None:
        """Report violations; end the job if ``fatal`` is set."""
        for what in found:
            self._session.emit(RuleViolated(step=step + 1, what=what))
        if found and self._fatal:
            raise JobFailedError(f"{found[0]} (fatal is set)")

    def _release(self, protected: int) -> None:
        """Release the log records of trained, protected samples; drop inherited logs once done."""
        below = self.ledger.released(max(0, protected))
        self._log.release(below)
        if below < self._inherited:
            return
        for worker in self._state.workers:
            if worker != self._worker:
                try:
                    self._session.sidecar.log_drop(worker.log, node=worker.node)
                except CkptError as error:
                    _log.warning("the token log of %s cannot be removed: %s", worker.seat, error)
        self._state.workers = ()


def _check_turns(plan: BatchPlan, policies: Sequence[str], *, shares: bool) -> None:
    """Raise ``ConfigError`` for turns and policies that no loop can have."""
    if plan.limits.turns and shares:
        raise ConfigError(
            "Rollouts(share=…): episodes of several turns are not shared; leave share or "
            "TurnLimits(turns=True) out"
        )
    if not policies:
        return
    if not plan.limits.turns:
        raise ConfigError(
            f"Rollouts(policies={[*policies]}): policies speak in turns; give the plan "
            "TurnLimits(turns=True)"
        )
    if "" in policies or len(set(policies)) < len(policies):
        raise ConfigError(f"Rollouts(policies={[*policies]}): give each a name of its own")
    if plan.skips:
        raise ConfigError(
            f"Rollouts(policies={[*policies]}): a group whose rewards are all equal for one policy "
            "may teach another; set Scheduling(skip_equal=…) to None"
        )
