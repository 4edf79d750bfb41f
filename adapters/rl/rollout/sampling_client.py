"""The base of rollout workers: claims work, pulls weights for it, and delivers the samples.

A claimant follows rank 0 of the newest generation, and never ends because the trainer is away: it
keeps finished samples until they are trained and protected, and hands them to every next leader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from torch import Tensor

from holdfast.adapters.rl.ledger.plan import Assignment
from holdfast.adapters.rl.samples.token_log import TokenLog
from holdfast.adapters.rl.samples.trajectory import Delta, SampleId, Trajectory
from holdfast.adapters.rl.server.asking import ask_digest
from holdfast.adapters.rl.server.messages import (
    EXCHANGE,
    Answer,
    WorkerExchange,
    WorkerIdentity,
)
from holdfast.adapters.rl.weights.places import WeightsPlace
from holdfast.adapters.rl.weights.pull import Pulled, Reader, RefusedWeightsError, pull
from holdfast.adapters.rl.weights.setup import require_same
from holdfast.ckpt.errors import CkptError, NotFoundError, PeerError
from holdfast.ckpt.recovery.replica import Replica
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.transport import Client, RunKey
from holdfast.elastic.channel.base import WorkerPhase
from holdfast.elastic.errors import JobFailedError
from holdfast.elastic.events import (
    BackPressure,
    Event,
    SamplingChanged,
    VersionUnavailable,
    WeightsPulled,
    WeightsRefused,
)
from holdfast.elastic.membership.records import Roster

_EXCHANGE_TIMEOUT_S = 0.5
_HEARTBEAT_S = 0.25
RETRY_S = 0.02
_AWAIT_VERSION_S = 0.05
_PULL_LIMIT_S = 3.0
_MISSING_LIMIT_S = 30.0


class Host(Protocol):
    """The surroundings that a claimant needs: a channel, or a stand-in for one."""

    node: str
    seat: str
    incarnation: str
    key: RunKey

    @property
    def sidecar(self) -> str:
        """Address of the node's sidecar, which may change."""

    def roster(self) -> Roster:
        """Return the last known state of the whole job."""

    def leaving(self) -> bool:
        """Say whether the node is about to be taken away."""

    def handed_over(self, *, generation: int, step: int) -> None:
        """Report that this worker holds nothing any more that would be lost with it."""

    def beat(self, *, step: int, phase: WorkerPhase) -> None:
        """Report progress."""

    def emit(self, event: Event) -> None:
        """Record an event."""


class SampledWork(Protocol):
    """The samples in progress, under the weights of one policy version: `Engine` and its like.

    ``pinned``: weights change only while nothing is in progress. ``renewable``: newer weights may
    be loaded now. ``free``: how many more of ``slots`` samples may be put.
    """

    @property
    def pinned(self) -> bool:
        """See the class."""

    @property
    def renewable(self) -> bool:
        """See the class."""

    @property
    def slots(self) -> int:
        """See the class."""

    @property
    def free(self) -> int:
        """See the class."""

    @property
    def idle(self) -> bool:
        """True if no sample is in progress."""

    @property
    def version(self) -> int | None:
        """Policy version of the weights; None before the first."""

    @property
    def generation(self) -> int:
        """Generation in which the weights were pulled."""

    def load(self, weights: Mapping[str, Tensor], *, version: int, generation: int) -> None:
        """Load the weights of a policy version; samples in progress continue under them."""

    def unload(self) -> None:
        """Forget the weights and all unfinished samples."""

    def put(self, trajectory: Trajectory) -> None:
        """Start or continue a trajectory."""

    def running(self) -> list[Trajectory]:
        """Return the trajectories in progress, as they are now."""

    def progress(self) -> dict[SampleId, int]:
        """Return how many tokens of each running trajectory were sampled."""

    def oldest(self) -> dict[SampleId, int]:
        """Return the oldest version of each running trajectory's tokens, future ones included."""

    def drop(self, keys: set[SampleId]) -> None:
        """Stop working on these samples."""


class WeightsElsewhere(Protocol):
    """The weights of policies that other runs train: `OtherPolicies`."""

    def pull(self, version: int) -> Mapping[str, Tensor]:
        """Return the tensors of a version. Raises ``CkptError`` if they cannot be had now."""

    def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True, slots=True)
class _Link:
    """The connection to the leader of one generation."""

    generation: int
    client: Client


class SamplingClient:
    """The claimant of the module's docstring; ``stopped`` says when to stop waiting for anything.

    ``names`` are the parameters that are pulled, ``frozen`` is the digest of the policy's other
    tensors. ``retained`` is as in `pull`; ``most_tokens`` limits the tokens held, None: no limit.
    ``elsewhere`` has the weights of policies that other runs train, None without them.
    """

    def __init__(
        self,
        host: Host,
        engine: SampledWork,
        names: Sequence[str],
        *,
        stopped: Callable[[], bool],
        frozen: str | None = None,
        retained: int = 0,
        most_tokens: int | None = None,
        elsewhere: WeightsElsewhere | None = None,
    ) -> None:
        self._elsewhere = elsewhere
        self._host, self._engine, self._stopped = host, engine, stopped
        self._names, self._frozen = names, frozen
        self._retained, self._most_tokens = retained, most_tokens
        self._worker = WorkerIdentity(seat=host.seat, incarnation=host.incarnation, node=host.node)
        self._log = TokenLog(self._client, self._worker.log)
        self._replica = Replica()
        self._refused = 0
        self._sidecar: SidecarClient | None = None
        self._link: _Link | None = None
        self._finished: dict[SampleId, Trajectory] = {}
        self._unsent: set[SampleId] = set()
        self._left: tuple[Trajectory, ...] = ()
        self._aside: dict[SampleId, Trajectory] = {}
        self._aside_unsent: set[SampleId] = set()
        self._allowance: int | None = None
        self._sampled = 0
        self._parted_from: int | None = None
        self._was_full = False
        self._again = False
        self._next_exchange = 0.0
        self._ticks = 0
        self._had_samples = False
        self._missed: tuple[int, float] | None = None
        self.over = False
        """True if the leader said that no more work will come."""

    @property
    def parted(self) -> bool:
        """True if everything was handed over to the present leader, in order to leave."""
        return self._link is not None and self._parted_from == self._link.generation

    def attend(self, *, at_once: bool = False) -> bool:
        """Follow the leader and exchange with it when due; False: it is time to leave."""
        self._follow()
        if self._host.leaving():
            self._leave()
            return False
        if self._due() or (at_once and self._link is not None):
            self._exchange()
        return True

    def finish(self, trajectory: Trajectory) -> None:
        """Queue a finished sample for delivery; keep it until it is trained and protected."""
        self._finished[trajectory.key] = trajectory
        self._unsent.add(trajectory.key)

    def log(self, deltas: Sequence[Delta]) -> None:
        """Append sampled tokens to the log, or all that is held if the log starts anew."""
        self._log.append(deltas, self._holding)

    def close(self) -> None:
        """Close the connections."""
        if self._link:
            self._link.client.close()
        if self._sidecar:
            self._sidecar.close()
        if self._elsewhere:
            self._elsewhere.close()

    # -- the leader --------------------------------------------------------------------------

    def _follow(self) -> None:
        """Connect to rank 0 of the newest generation."""
        record = self._host.roster().generation
        if record is None or (self._link and self._link.generation == record.number):
            return
        leader = record.members[0].info
        require_same(self._frozen, here=self._worker.seat, others=leader.get("frozen"))
        address = leader.get("rollout")
        if self._link:
            self._link.client.close()
        client = Client(str(address), self._host.key, timeout_s=_EXCHANGE_TIMEOUT_S)
        self._link = _Link(record.number, client)
        self._introduce()
        self._unsent, self._again = set(self._finished), True
        self._aside_unsent = set(self._aside)
        self._next_exchange = 0.0

    def _introduce(self) -> None:
        """Take over the host's identity; a new identity has a new log."""
        host = self._host
        worker = WorkerIdentity(seat=host.seat, incarnation=host.incarnation, node=host.node)
        if worker != self._worker:
            self._worker, self._log = worker, TokenLog(self._client, worker.log)

    def _due(self) -> bool:
        if self._link is None:
            return False
        now, free = time.monotonic(), self._engine.free
        wanting = bool(self._unsent or self._aside_unsent) or free * 4 >= self._engine.slots
        wanting = wanting or (self._allowance is not None and self._sampled >= self._allowance)
        return now >= self._next_exchange and (wanting or now >= self._next_exchange + _HEARTBEAT_S)

    def _exchange(self) -> None:
        engine, running = self._engine, self._engine.progress()
        oldest = engine.oldest()
        answer = self._call(
            running=tuple((*key, count) for key, count in running.items()),
            oldest=tuple(oldest[key] for key in running),
            free=engine.free,
            version=engine.version,
            loaded_in=engine.generation,
            full=self._is_full(),
        )
        if answer is not None:
            self._obey(answer)

    def _call(self, **fields: Any) -> Answer | None:
        """Send the leader all undelivered samples, with more ``fields`` of `WorkerExchange`.

        Returns None if it must be tried again.
        """
        link = self._link
        assert link is not None
        sent = sorted(self._unsent & self._finished.keys())
        aside = sorted(self._aside_unsent & self._aside.keys())
        exchange = WorkerExchange(
            worker=self._worker,
            generation=link.generation,
            finished=tuple(self._finished[key] for key in sent),
            again=self._again,
            set_aside=tuple(self._aside[key] for key in aside),
            **{"left": self._left, **fields},
        )
        self._host.beat(step=self._ticks, phase=WorkerPhase.WAIT)
        try:
            body, _ = link.client.call(EXCHANGE, msgspec.to_builtins(exchange))
            answer = msgspec.convert(body, Answer)
        except PeerError:
            answer = Answer(leading=False)
        if not answer.leading:
            self._again, self._next_exchange = True, time.monotonic() + RETRY_S
            return None
        self._unsent -= set(sent)
        self._aside_unsent -= set(aside)
        self._again, self._left = False, ()
        self._sampled = 0
        return answer

    def _leave(self) -> None:
        """Hand all work in progress to the leader, once there is one, and wait for the end."""
        link = self._link
        if link is not None and self._parted_from != link.generation:
            left = (*self._left, *self._engine.running())
            self._unsent, self._again = set(self._finished), True
            self._aside_unsent = set(self._aside)
            if self._call(left=left, leaving=True) is not None:
                self._parted_from = link.generation
                self._aside |= {trajectory.key: trajectory for trajectory in left}
                self._engine.drop(set(self._engine.progress()))
                self._host.handed_over(generation=link.generation, step=self._ticks)
                self._tell(0)
        self._host.beat(step=self._ticks, phase=WorkerPhase.IDLE)
        time.sleep(RETRY_S)

    def _is_full(self) -> bool:
        """Return whether the token limit is reached; record a change."""
        most = self._most_tokens
        if most is None:
            return False
        held_tokens = sum(len(trajectory.tokens) for trajectory in self._holding())
        if (held_tokens >= most) != self._was_full:
            self._was_full = held_tokens >= most
            because = "worker" if self._was_full else "none"
            self._host.emit(BackPressure(because=because, held_tokens=held_tokens))
        return held_tokens >= most

    def _obey(self, answer: Answer) -> None:
        engine = self._engine
        if answer.reload:
            self._left = tuple(engine.running())
            engine.unload()
        engine.drop(set(answer.abandon))
        if answer.released:
            self._finished = {k: t for k, t in self._finished.items() if k[0] >= answer.released}
            self._aside = {k: t for k, t in self._aside.items() if k[0] >= answer.released}
            self._aside_unsent &= self._aside.keys()
            self._log.release(answer.released)
        self._set_aside(set(answer.set_aside))
        self._allowance, self.over = answer.allowance, answer.over
        self._renew(answer.work)
        if answer.work and self._ready_for(max(each.version for each in answer.work)):
            for assignment in answer.work:
                self._aside.pop(assignment.trajectory.key, None)
                self._aside_unsent.discard(assignment.trajectory.key)
                engine.put(assignment.trajectory)
        pause_s = RETRY_S if answer.over or not (engine.idle or engine.free == 0) else 0.0
        self._next_exchange = time.monotonic() + pause_s

    def _set_aside(self, keys: set[SampleId]) -> None:
        """Stop these samples, and keep them for later leaders, in case this one is lost."""
        stopped = [each for each in self._engine.running() if each.key in keys]
        self._aside |= {trajectory.key: trajectory for trajectory in stopped if trajectory.tokens}
        self._aside_unsent |= {trajectory.key for trajectory in stopped} & self._aside.keys()
        self._engine.drop(keys)

    def _tell(self, samples: int) -> None:
        """Record when the first samples have tokens in the log, and when none is in progress."""
        if bool(samples) != self._had_samples:
            self._had_samples = bool(samples)
            self._host.emit(SamplingChanged(samples=samples))

    def _holding(self) -> list[Trajectory]:
        return [*self._finished.values(), *self._aside.values(), *self._engine.running()]

    # -- weights -----------------------------------------------------------------------------

    def _ready_for(self, version: int) -> bool:
        """Load the weights of ``version``, or of a newer one if not pinned; say whether it worked.

        Returns False if the leader changed first, or if the version is unavailable: then the work
        belongs to the leader again. The call waits for a version that is not protected yet, however
        long. It asks the other sidecars too where this node's need not know the version: if the
        generation is past it, or has protected nothing yet and so began from an older one's step.
        """
        engine, link = self._engine, self._link
        if engine.version is not None and (
            engine.version == version or (not engine.pinned and engine.version > version)
        ):
            return True
        deadline_s, everywhere = time.monotonic() + _PULL_LIMIT_S, False
        avoid: frozenset[int] = frozenset()
        while link is not None and not self._stopped() and not self._host.leaving():
            roster = self._host.roster()
            if roster.generation is None or roster.generation.number != link.generation:
                return False
            try:
                others = self._elsewhere.pull(version) if self._elsewhere else {}
            except CkptError as error:
                if time.monotonic() > deadline_s:  # its run comes back when it does
                    self._host.emit(
                        VersionUnavailable(version=version, seconds=_PULL_LIMIT_S, why=str(error))
                    )
                    return False
                self._host.beat(step=self._ticks, phase=WorkerPhase.WAIT)
                time.sleep(_AWAIT_VERSION_S)
                continue
            try:
                pulled = self._pull(version, roster, everywhere=everywhere, avoid=avoid)
            except NotFoundError as error:
                reached = self._await_version(version, link.generation)
                passed = reached >= version
                everywhere = passed or (reached < 0 and roster.generation.restore is not None)
                if passed and not engine.pinned:
                    version = reached
                if passed and time.monotonic() > deadline_s:
                    return self._without(version, error)
                continue
            except CkptError as error:
                if isinstance(error, RefusedWeightsError):
                    avoid = self._refuse(error)
                if time.monotonic() > deadline_s:
                    return self._without(version, error)
                time.sleep(RETRY_S)
                continue
            self._missed = None
            self._load(pulled, link.generation, others=others)
            return True
        return False

    def _pull(
        self, version: int, roster: Roster, *, everywhere: bool, avoid: frozenset[int]
    ) -> Pulled:
        reader = Reader(
            client=self._client(), node=self._host.node, roster=roster, key=self._host.key
        )
        return pull(
            self._names,
            version=version,
            reader=reader,
            everywhere=everywhere,
            replica=self._replica,
            expected=self._published,
            avoid=avoid,
            retained=self._retained,
        )

    def _published(self, place: WeightsPlace) -> str:
        """Ask the leader for the digest of weights. Raises ``PeerError`` if it gives none."""
        link = self._link
        assert link is not None
        return ask_digest(link.client, place, generation=link.generation)

    def _refuse(self, error: RefusedWeightsError) -> frozenset[int]:
        """Count and report refused weights; return the ranks whose blocks to avoid."""
        self._refused += 1
        self._host.emit(
            WeightsRefused(
                version=error.version,
                count=self._refused,
                avoided=tuple(sorted(error.ranks)),
                why=str(error),
            )
        )
        return error.ranks

    def _load(self, pulled: Pulled, generation: int, *, others: Mapping[str, Tensor]) -> None:
        engine = self._engine
        before = engine.version if engine.generation == generation else None
        engine.load({**pulled.tensors, **others}, version=pulled.version, generation=generation)
        self._host.emit(
            WeightsPulled(
                generation=generation,
                version=pulled.version,
                before=before,
                seconds=pulled.seconds,
                bytes=pulled.nbytes,
                saved_bytes=pulled.saved,
                digest=pulled.digest,
            )
        )

    def _renew(self, work: Sequence[Assignment]) -> None:
        """Load the newest protected version, if samples may continue under it."""
        engine, link = self._engine, self._link
        if not engine.renewable or link is None or (engine.version is None and not work):
            return
        try:
            newest = self._client().protected_step(generation=link.generation)
        except CkptError:
            return
        if engine.version is None or newest > engine.version:
            self._ready_for(max(newest, 0))

    def _without(self, version: int, error: CkptError) -> bool:
        """Go on without a version that is unavailable; return False.

        Raises ``JobFailedError`` when the same one was missing for long, whatever the leader did.
        """
        now_s = time.monotonic()
        if self._missed is None or self._missed[0] != version:
            self._missed = (version, now_s)
        missing_s = now_s - self._missed[1]
        self._host.emit(VersionUnavailable(version=version, seconds=missing_s, why=str(error)))
        if missing_s > _MISSING_LIMIT_S:
            raise JobFailedError(
                f"the weights of version {version} cannot be fetched any more, after "
                f"{missing_s:.0f} s of trying: {error}; keep more snapshots than eta "
                "(Snapshots(keep=...))"
            )
        return False

    def _await_version(self, version: int, generation: int) -> int:
        """Wait a moment, at the sidecar, for the version to be protected.

        Returns the newest protected one: if it is newer, the version will not come any more.
        """
        self._host.beat(step=self._ticks, phase=WorkerPhase.WAIT)
        try:
            reached = self._client().protected_step(
                generation=generation, at_least=version, timeout_s=_AWAIT_VERSION_S
            )
        except CkptError:
            reached = -1
        if reached >= version:
            time.sleep(RETRY_S)
        return reached

    def _client(self) -> SidecarClient:
        """Return a client of the node's sidecar at its present address."""
        if self._sidecar is None or self._sidecar.address != self._host.sidecar:
            if self._sidecar is not None:
                self._sidecar.close()
            self._sidecar = SidecarClient(self._host.sidecar, self._host.key)
        return self._sidecar
