"""The rollout server on rank 0: gives out work, takes samples, salvages the logs of lost workers.

Every trainer process has one, for its whole life; the one of rank 0 *leads* for the time of a
generation. A worker is lost when it leaves the roster (its process is gone) or stays silent too
long. Its log is read from its node's sidecar or from a copy on another node, and dropped once all
it may hold is trained and protected.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from holdfast.adapters.rl.config import ROLE
from holdfast.adapters.rl.ledger.budget import Pressure
from holdfast.adapters.rl.ledger.checker import Consumer
from holdfast.adapters.rl.ledger.ledger import Ledger
from holdfast.adapters.rl.ledger.plan import Assignment
from holdfast.adapters.rl.ledger.states import DeliveryVerdict
from holdfast.adapters.rl.ledger.tail_figures import Tail
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Delta, SampleId, Trajectory
from holdfast.adapters.rl.server.census import LedgerCensus
from holdfast.adapters.rl.server.messages import (
    DIGEST,
    EXCHANGE,
    Answer,
    AskDigest,
    ToldDigest,
    WorkerExchange,
    WorkerIdentity,
)
from holdfast.adapters.rl.server.salvage import read_log, take_over
from holdfast.adapters.rl.weights.places import WeightsPlace
from holdfast.adapters.rl.weights.publisher import Publisher
from holdfast.adapters.shared.record_logs import LogReader
from holdfast.ckpt.errors import CkptError, HoldfastError, PeerError
from holdfast.ckpt.transport import Request, RunKey, Server
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import JobFailedError
from holdfast.elastic.events import BackPressure, Event, RolloutLeft, StepTail
from holdfast.elastic.membership.records import Roster, WorkerState

_log = logging.getLogger(__name__)

_LONG_POLL_S = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPatience:
    """Time limits for workers, in seconds.

    ``announce_s``: to announce themselves to a new leader. ``silence_s``: before a silent one
    counts as lost. ``log_s``: for reading a lost one's log.
    """

    announce_s: float = 1.0
    silence_s: float = 10.0
    log_s: float = 3.0


@dataclass(slots=True, kw_only=True)
class _WorkerSeen:
    worker: WorkerIdentity
    last_message_s: float
    in_roster: bool = False
    progress: dict[SampleId, int] = field(default_factory=dict)
    weights: tuple[int, int] | None = None


@dataclass(slots=True, kw_only=True)
class Term:
    """The time of one generation during which this server leads.

    ``alive`` returns the incarnations of the running workers; ``digest_of`` finds the digest of the
    weights at a place.
    """

    generation: int
    ledger: Ledger
    prompt_of: Callable[[int], Tokens]
    alive: Callable[[], set[str]]
    logs: LogReader
    emit: Callable[[Event], None]
    began: float
    digest_of: Callable[[WeightsPlace], str] | None = None
    seen: dict[str, _WorkerSeen] = field(default_factory=dict)
    lost: dict[str, tuple[WorkerIdentity, int]] = field(default_factory=dict)
    recovering: set[str] = field(default_factory=set)
    former: set[str] = field(default_factory=set)
    announced: set[str] = field(default_factory=set)
    handed: list[Trajectory] = field(default_factory=list)
    tail: Tail = field(default_factory=Tail)
    census: LedgerCensus = field(default_factory=LedgerCensus)
    pressure: Pressure = Pressure.NONE
    released: int = 0
    over: bool = False


class LedgerGuard(Protocol):
    """Guards a ledger by its ``lock``, and knows the workers whose logs still matter."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock that is held while the ledger is read or changed."""

    def workers(self) -> tuple[WorkerIdentity, ...]:
        """Return the workers that may hold samples not yet trained, lost ones included."""


class LedgerState:
    """The ledger and the workers whose logs still matter, as one tracked, locked state."""

    def __init__(self, ledger: Ledger, keeper: LedgerGuard) -> None:
        self._ledger, self._keeper = ledger, keeper
        self.workers: tuple[WorkerIdentity, ...] = ()

    def state_dict(self) -> dict[str, Json]:
        """Return both as JSON values."""
        with self._keeper.lock:
            workers = self._keeper.workers() or self.workers
            return {
                "ledger": self._ledger.state_dict(),
                "workers": [msgspec.to_builtins(worker) for worker in workers],
            }

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Replace both by what ``state_dict`` returned."""
        self._ledger.load_state_dict(state["ledger"])
        self.workers = tuple(msgspec.convert(w, WorkerIdentity) for w in state["workers"])


class RolloutServer:
    """The server of the module's docstring. ``lock`` guards the ledger of the current term."""

    def __init__(self, key: RunKey, *, patience: WorkerPatience | None = None) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._patience = patience or WorkerPatience()
        self._term: Term | None = None
        self._waiting: list[tuple[float, WorkerExchange, Request]] = []
        self._handed: dict[str, tuple[WorkerIdentity, tuple[Trajectory, ...]]] = {}
        self._given_up: Exception | None = None
        self._salvage: queue.SimpleQueue[tuple[Term, WorkerIdentity, bool] | None] = (
            queue.SimpleQueue()
        )
        self._publisher = Publisher()
        self._server = Server(self._handle, key=key, tick=self._tick)
        self.address = self._server.address
        threading.Thread(target=self._salvage_all, name="rollout-salvage", daemon=True).start()

    # -- the trainer's side ------------------------------------------------------------------

    def lead(self, term: Term, *, former: tuple[WorkerIdentity, ...] = ()) -> None:
        """Begin to lead; first read the logs of ``former`` workers that are gone.

        Logs of workers that handed everything over to this server are not read.
        """
        with self._changed:
            self._term = term
            alive = term.alive()
            for worker, handed in self._handed.values():
                term.handed += handed
                term.lost[worker.incarnation] = (worker, term.ledger.admitted)
            for worker in former:
                if worker.incarnation not in alive | self._handed.keys():
                    term.former.add(worker.incarnation)
                    self._lose(term, worker)
            self._changed.notify_all()

    def retire(self) -> None:
        """Stop leading: the generation is over."""
        with self._changed:
            self._term = None
            self._answer_waiting(everyone=True)

    def close(self) -> None:
        """Stop serving for good."""
        self.retire()
        self._salvage.put(None)
        self._publisher.close()
        self._server.close()

    def workers(self) -> tuple[WorkerIdentity, ...]:
        """Return the workers that may hold samples not yet trained, lost ones included."""
        term = self._term
        if term is None:
            return ()
        return (
            *(seen.worker for seen in term.seen.values()),
            *(worker for worker, _ in term.lost.values()),
        )

    def consumers(self) -> tuple[Consumer, ...]:
        """Return the weights that each worker samples with, as far as reported."""
        seen = self._term.seen if self._term else {}
        return tuple(
            Consumer(name=key, generation=each.weights[0], version=each.weights[1])
            for key, each in seen.items()
            if each.weights is not None
        )

    def advance(self, completed: int, *, protected: int) -> None:
        """Admit what ``completed`` steps allow; release what ``protected`` steps used."""
        with self._changed:
            term = self._leading()
            term.ledger.admit(completed, term.prompt_of)
            for trajectory in term.handed:
                term.ledger.recover(trajectory)
            term.handed.clear()
            term.released = max(term.released, term.ledger.released(protected))
            self._let_go(term)
            self._answer_waiting()

    def _let_go(self, term: Term) -> None:
        """Forget lost workers whose samples are trained and protected; drop their logs."""
        for key, (worker, admitted) in list(term.lost.items()):
            if admitted <= term.released and key not in term.recovering:
                del term.lost[key]
                term.announced.discard(key)
                self._handed.pop(key, None)
                self._salvage.put((term, worker, True))

    def wait_batch(self, step: int, *, timeout_s: float) -> list[Trajectory] | None:
        """Return the samples of ``step``, or None if they are not complete in time."""
        with self._changed:
            term = self._leading()
            ledger = term.ledger
            self._changed.wait_for(
                lambda: self._given_up or ledger.batch(step) is not None or ledger.stuck, timeout_s
            )
            if self._given_up:
                raise self._given_up
            if ledger.stuck:
                raise JobFailedError(ledger.stuck)
            return ledger.batch(step)

    def train(self, step: int, samples: Sequence[Trajectory], rewards: Sequence[float]) -> StepTail:
        """Mark ``step`` as trained on ``samples``; return the figures of its tail (`Tail`).

        The figures cover the samples that are trained on for the first time.
        """
        with self._changed:
            term, ledger = self._leading(), self._leading().ledger
            ledger.train(step, rewards)
            taken = ledger.taken(step) or ()
            fresh = [sample for sample in samples if sample.ordinal in taken]
            tail = term.tail.step(
                fresh,
                completes=step + 1,
                carried_tokens=ledger.held_tokens,
                ordinals=tuple(taken) if ledger.plan.by_arrival else None,
                now_s=time.monotonic(),
            )
            if ledger.plan.skips:
                term.tail.forget(taken)
            self._tell_pressure(term)
            self._answer_waiting()
            return tail

    def give_up(self, error: Exception) -> None:
        """Make waits for a batch raise ``error``: no sampler is left."""
        with self._changed:
            self._given_up = error
            self._changed.notify_all()

    def finish(self) -> None:
        """Tell workers that ask that no more work will come."""
        with self._changed:
            self._leading().over = True
            self._answer_waiting()

    def _leading(self) -> Term:
        if self._term is None:
            raise HoldfastError("this rollout server leads no generation")
        return self._term

    # -- the workers' side (I/O thread) ------------------------------------------------------

    def _handle(self, request: Request) -> None:
        if request.op == DIGEST:
            self._tell_digest(request)
            return
        if request.op != EXCHANGE:
            raise PeerError(
                f"operation {request.op!r} is not known; there are {EXCHANGE} and {DIGEST}"
            )
        try:
            exchange = msgspec.convert(request.body, WorkerExchange)
        except msgspec.ValidationError as error:
            raise PeerError(f"malformed exchange: {error}") from error
        with self._changed:
            term, worker = self._term, exchange.worker
            self._waiting = [waiting for waiting in self._waiting if waiting[1].worker != worker]
            if term is None or term.generation != exchange.generation:
                request.reply(msgspec.to_builtins(Answer(leading=False)))
                return
            if exchange.leaving:
                self._part(term, exchange)
                request.reply(msgspec.to_builtins(Answer(leading=True, released=term.released)))
                self._answer_waiting()
                self._changed.notify_all()
                return
            reload, abandon = self._take(term, exchange)
            answer = self._offer(term, exchange, reload=reload, abandon=abandon)
            self._note_slots(term, exchange, answer)
            self._tell_pressure(term)
            if answer is None:
                self._waiting.append((time.monotonic() + _LONG_POLL_S, exchange, request))
            else:
                request.reply(msgspec.to_builtins(answer))
            self._changed.notify_all()

    def _tell_digest(self, request: Request) -> None:
        """Have the publisher answer, for a version of the run's history."""
        try:
            ask = msgspec.convert(request.body, AskDigest)
        except msgspec.ValidationError as error:
            raise PeerError(f"malformed question for a digest: {error}") from error
        place = ask.place
        with self._changed:
            term = self._term
            if term is None or term.generation != ask.generation:
                request.reply(msgspec.to_builtins(ToldDigest(leading=False)))
                return
            current = term.ledger.current(generation=place.generation, version=place.version)
        if term.digest_of is None or not current:
            why = "it was rolled back" if not current else "this leader publishes none"
            request.reply(msgspec.to_builtins(ToldDigest(leading=True, why=why)))
            return

        def reply(digest: str, why: str) -> None:
            request.reply(msgspec.to_builtins(ToldDigest(leading=True, digest=digest, why=why)))

        self._publisher.ask(place, term.digest_of, reply)

    def _take(self, term: Term, exchange: WorkerExchange) -> tuple[bool, set[SampleId]]:
        """Record a worker's report and samples; return whether it must reload, what to abandon."""
        worker, ledger = exchange.worker, term.ledger
        seen = term.seen.setdefault(
            worker.incarnation, _WorkerSeen(worker=worker, last_message_s=0.0)
        )
        term.lost.pop(worker.incarnation, None)
        term.announced.add(worker.incarnation)
        seen.last_message_s = time.monotonic()
        self._hand_in(term, exchange)
        running = {(ordinal, sample): count for ordinal, sample, count in exchange.running}
        reload = exchange.version is not None and not ledger.current(
            generation=exchange.loaded_in, version=exchange.version
        )
        kept = set() if reload else running.keys()
        oldest = dict(zip(running, exchange.oldest, strict=False))
        abandon = ledger.hold(worker.incarnation, kept, oldest=oldest)
        ledger.abandon(worker.incarnation, ledger.claimed(worker.incarnation) - kept)
        seen.progress = {} if reload else running
        ledger.report(seen.progress)
        version = None if reload else exchange.version
        seen.weights = None if version is None else (exchange.loaded_in, version)
        return reload, abandon

    def _hand_in(self, term: Term, exchange: WorkerExchange) -> None:
        """Give the ledger the samples that a worker finished, left or set aside."""
        ledger, now_s = term.ledger, time.monotonic()
        for trajectory in exchange.finished:
            if ledger.deliver(trajectory, again=exchange.again) is DeliveryVerdict.ACCEPTED:
                term.tail.arrived(trajectory.key, now_s=now_s)
        for trajectory in exchange.left:
            ledger.recover(trajectory)
        for trajectory in exchange.set_aside:
            ledger.set_aside(trajectory)

    def _part(self, term: Term, exchange: WorkerExchange) -> None:
        """Take over everything from a worker that ends, for this term and the next ones.

        Its log still matters if another process leads before all of it is trained.
        """
        worker, ledger = exchange.worker, term.ledger
        given = (*exchange.finished, *exchange.left, *exchange.set_aside)
        self._handed[worker.incarnation] = (worker, given)
        term.announced.add(worker.incarnation)
        self._hand_in(term, exchange)
        term.seen.pop(worker.incarnation, None)
        term.tail.gone(worker.incarnation, now_s=time.monotonic())
        ledger.leave(worker.incarnation)
        term.lost[worker.incarnation] = (worker, ledger.admitted)
        term.emit(
            RolloutLeft(
                worker=worker.seat,
                samples=len(exchange.left),
                tokens=sum(each.sampled for each in exchange.left),
                finished=len(exchange.finished),
            )
        )

    def _note_slots(self, term: Term, exchange: WorkerExchange, answer: Answer | None) -> None:
        """Record how many slots a worker has busy with this answer (None: it waits)."""
        running, worker = len(exchange.running), exchange.worker.incarnation
        busy = running + (len(answer.work) if answer else 0)
        slots = running + exchange.free
        term.tail.occupied(worker, busy=busy, slots=slots, now_s=time.monotonic())

    def _tell_pressure(self, term: Term) -> None:
        """Record when work begins to be restricted, and when it no longer is."""
        ledger = term.ledger
        if ledger.pressure is not term.pressure:
            term.pressure = ledger.pressure
            term.emit(BackPressure(because=term.pressure.value, held_tokens=ledger.held_tokens))

    def _offer(
        self, term: Term, exchange: WorkerExchange, *, reload: bool, abandon: set[SampleId]
    ) -> Answer | None:
        """Return the answer, or None while an idle worker should wait for work."""
        ledger, worker = term.ledger, exchange.worker.incarnation
        at_work = exchange.running or not ledger.plan.pinned
        bound = exchange.version if at_work and not reload else None
        beyond = set() if reload else ledger.beyond_budget(worker)
        work: tuple[Assignment, ...] = ()
        if exchange.free and self._settled(term):
            work = tuple(
                ledger.claim(worker, free=exchange.free, version=bound, full=exchange.full)
            )
        idle = exchange.free > 0 and not exchange.running
        handed_in = exchange.finished or exchange.set_aside
        if idle and not (work or abandon or reload or term.over or handed_in):
            return None
        return Answer(
            leading=True,
            work=work,
            abandon=tuple(sorted(abandon)),
            reload=reload,
            released=term.released,
            over=term.over,
            set_aside=tuple(sorted(beyond)),
            allowance=ledger.allowance(len(term.seen)),
        )

    def _settled(self, term: Term) -> bool:
        """Say whether the samples of living workers and the logs of lost ones are known."""
        if term.former:
            return False
        if time.monotonic() - term.began > self._patience.announce_s:
            return True
        return term.alive() <= term.announced

    def _answer_waiting(self, *, everyone: bool = False) -> None:
        now, term = time.monotonic(), self._term
        still: list[tuple[float, WorkerExchange, Request]] = []
        for deadline, exchange, request in self._waiting:
            answer: Answer | None = Answer(leading=False)
            if term is not None and term.generation == exchange.generation:
                answer = self._offer(term, exchange, reload=False, abandon=set())
                self._note_slots(term, exchange, answer)
                if answer is None and (everyone or now >= deadline):
                    answer = Answer(leading=True, released=term.released, over=term.over)
            if answer is None:
                still.append((deadline, exchange, request))
            else:
                request.reply(msgspec.to_builtins(answer))
        self._waiting = still

    # -- lost workers ------------------------------------------------------------------------

    def _tick(self) -> None:
        with self._changed:
            term = self._term
            if term is not None:
                self._look_for_lost(term)
                self._count(term)
            if self._waiting:
                self._answer_waiting()

    def _count(self, term: Term) -> None:
        now_s = time.monotonic()
        found = term.census.take(term.ledger, workers=len(term.seen), now_s=now_s)
        if found is not None:
            term.emit(found)

    def _look_for_lost(self, term: Term) -> None:
        alive, now = term.alive(), time.monotonic()
        for seen in list(term.seen.values()):
            present = seen.worker.incarnation in alive
            silent = now - seen.last_message_s > self._patience.silence_s
            if (seen.in_roster and not present) or silent:
                self._lose(term, seen.worker)
            seen.in_roster = seen.in_roster or present

    def _lose(self, term: Term, worker: WorkerIdentity) -> None:
        if worker.incarnation in term.recovering:
            return
        term.lost[worker.incarnation] = (worker, term.ledger.admitted)
        term.recovering.add(worker.incarnation)
        self._salvage.put((term, worker, False))

    def _salvage_all(self) -> None:
        """Read or drop the logs of lost workers one by one (own thread: it may block)."""
        while (job := self._salvage.get()) is not None:
            term, worker, is_over = job
            if is_over:
                self._drop_log(term, worker)
                continue
            pieces = self._read_log(term, worker)
            with self._changed:
                term.recovering.discard(worker.incarnation)
                term.former.discard(worker.incarnation)
                if term is self._term:
                    self._recover(term, worker, pieces)
                    self._answer_waiting()
                    self._changed.notify_all()

    def _read_log(self, term: Term, worker: WorkerIdentity) -> dict[SampleId, Delta]:
        limit_s = self._patience.log_s
        return read_log(term.logs, worker, limit_s=limit_s, over=lambda: term is not self._term)

    def _drop_log(self, term: Term, worker: WorkerIdentity) -> None:
        try:
            term.logs.log_drop(worker.log, node=worker.node)
        except CkptError as error:
            _log.warning("the token log of %s cannot be removed: %s", worker.seat, error)

    def _recover(self, term: Term, worker: WorkerIdentity, pieces: dict[SampleId, Delta]) -> None:
        ledger, seen = term.ledger, term.seen.pop(worker.incarnation, None)
        unfinished = ledger.claimed(worker.incarnation)
        ledger.lose(worker.incarnation)
        term.tail.gone(worker.incarnation, now_s=time.monotonic())
        found = take_over(
            ledger, pieces, unfinished=unfinished, reported=seen.progress if seen else {}
        )
        term.emit(found.event(worker.seat))


def rollout_workers(roster: Roster) -> set[str]:
    """Return the incarnations of the running rollout workers, by the job's roster."""
    return {
        worker.incarnation
        for node in roster.nodes
        for worker in node.workers
        if worker.seat.startswith(f"{ROLE}/") and worker.state in _RUNNING
    }


_RUNNING = (WorkerState.READY, WorkerState.ACTIVE)
