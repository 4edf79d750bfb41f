"""The ledger: every prompt ordinal in exactly one state, every sample counted once. Pure.

A step trains on ``groups`` ordinals of ``group`` samples each, in their order, each ordinal once;
by `ReplayConfig` some of a step's groups are taken again, which is counted apart. The ordinals of
step t are admitted once policy version max(0, t - eta) exists, and no older one may sample them: so
staleness never exceeds eta, whatever fails, and in the first steps after it as well. By `Mode` that
version samples them entirely, or any from it on. An ordinal moves by `TRANSITIONS`; what is not
listed there is an error.

With `Order.ARRIVAL` a step takes the ordinals that are complete, by the rules of `order`, within
the same bound.

The ledger is part of the trainer's tracked state: a restored ledger and restored weights are one
consistent cut. Claims are not in it; after a restore what ran is pending until its workers
announce it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from adapters.rl.budget import Pressure, TokenBudget, pressure
from adapters.rl.order import Order
from adapters.rl.replay import Replay, ReplayConfig
from adapters.rl.schedule import Candidate, Lengths, queue, remaining
from adapters.rl.scheduling import Scheduling
from adapters.rl.taking import Taking
from adapters.rl.tokens import Tokens
from adapters.rl.trajectory import Limits, SampleId, Trajectory
from ckpt.types import Json
from elastic.errors import ElasticError

_RECORDED_STEPS = 64


class LedgerError(ElasticError):
    """The ledger was asked for what its state does not allow: a bug, or a state of another job."""


class State(StrEnum):
    """Where an ordinal is."""

    PENDING = "pending"
    RUNNING = "running"
    READY = "ready"
    TRAINED = "trained"
    DROPPED = "dropped"


class Event(StrEnum):
    """What happens to an ordinal."""

    CLAIM = "claim"
    RELEASE = "release"
    COMPLETE = "complete"
    TRAIN = "train"
    DROP = "drop"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.PENDING, Event.CLAIM): State.RUNNING,
    (State.PENDING, Event.COMPLETE): State.READY,
    (State.PENDING, Event.DROP): State.DROPPED,
    (State.RUNNING, Event.CLAIM): State.RUNNING,
    (State.RUNNING, Event.RELEASE): State.PENDING,
    (State.RUNNING, Event.COMPLETE): State.READY,
    (State.READY, Event.TRAIN): State.TRAINED,
    (State.DROPPED, Event.TRAIN): State.TRAINED,
}
"""(state, event) → state. A dropped ordinal leaves with its step, having contributed nothing."""


class Verdict(StrEnum):
    """What became of a delivered sample."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    ROLLED_BACK = "rolled_back"
    TOO_OLD = "too_old"
    UNKNOWN = "unknown"


class Mode(StrEnum):
    """How training and sampling go along.

    ``SYNC``: step t trains on what version t sampled: they take turns. ``FIXED_LAG``: on what
    version max(0, t - eta) sampled; the outcome is a function of the configuration, bit for bit.
    ``BOUNDED``: samples go on under every new version, none of their tokens is by one older than
    max(0, t - eta).
    """

    SYNC = "sync"
    FIXED_LAG = "fixed_lag"
    BOUNDED = "bounded"


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the job: ``steps`` steps of ``groups`` prompts with ``group`` samples each.

    ``eta`` is the largest staleness, 0 in mode ``SYNC``; that of groups taken again is bounded by
    ``replay``.
    """

    groups: int
    group: int
    eta: int
    steps: int
    limits: Limits
    mode: Mode = Mode.FIXED_LAG
    scheduling: Scheduling = Scheduling()
    replay: ReplayConfig = ReplayConfig()

    @property
    def fresh(self) -> int:
        """Number of groups of a step that were never trained on."""
        return self.groups - self.replay.reused(self.groups)

    @property
    def by_arrival(self) -> bool:
        """Whether steps take ordinals as they are complete."""
        return self.scheduling.order == Order.ARRIVAL

    @property
    def pinned(self) -> bool:
        """Whether a sample is of one version from its first token to its last."""
        return self.mode is not Mode.BOUNDED

    def step_of(self, ordinal: int) -> int:
        """Return the step (0-based) that trains on ``ordinal``."""
        return ordinal // self.fresh

    def version_of(self, ordinal: int) -> int:
        """Return the oldest policy version that may sample ``ordinal``; when pinned, the one."""
        return max(0, self.step_of(ordinal) - self.eta)

    def admitted(self, completed: int) -> int:
        """Return how many ordinals may be sampled once ``completed`` steps are done."""
        ahead = self.scheduling.ahead(groups=self.fresh, eta=self.eta)
        return min(self.fresh * (completed + 1) + ahead, self.fresh * self.steps)


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Work for a rollout worker: a sample to start or to go on with, by ``version`` or a newer."""

    version: int
    trajectory: Trajectory


class Counters(msgspec.Struct, kw_only=True):
    """What happened to tokens and samples; a lower bound after a rollback of the ledger.

    ``tokens_recovered`` came out of a lost worker's log; ``tokens_resampled`` had been reported
    by a lost worker and were not in its log. Set aside are samples that were beyond the token
    budget; too old are those that a late worker held when others were already promised the steps
    that could have taken them.
    """

    samples_accepted: int = 0
    tokens_sampled: int = 0
    tokens_recovered: int = 0
    tokens_resampled: int = 0
    duplicates_refused: int = 0
    redelivered: int = 0
    rolled_back: int = 0
    workers_lost: int = 0
    workers_left: int = 0
    samples_set_aside: int = 0
    samples_too_old: int = 0
    groups_reused: int = 0


@dataclass(slots=True)
class _Entry:
    prompt: Tokens
    state: State = State.PENDING
    reason: str = ""
    done: dict[int, Trajectory] = field(default_factory=dict)
    partial: dict[int, Trajectory] = field(default_factory=dict)
    claims: dict[int, str] = field(default_factory=dict)
    charged: dict[int, int] = field(default_factory=dict)
    """The tokens of each sample that the token budget was charged with."""

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return sum(len(each.tokens) for each in (*self.done.values(), *self.partial.values()))


class Ledger:
    """See the module's docstring. Not safe to share between threads without a lock."""

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan
        self.counters = Counters()
        self.trained_steps = 0
        self.staleness_max = 0
        self._entries: dict[int, _Entry] = {}
        self._admitted = 0
        self._cuts: dict[int, int] = {}
        self._conflicts: list[str] = []
        self._taking = Taking.by(plan.scheduling.order, groups=plan.fresh, eta=plan.eta)
        self._replay = Replay(plan.replay, count=plan.replay.reused(plan.groups))
        self._taken: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=_RECORDED_STEPS)
        self._budget = TokenBudget(limit=plan.scheduling.token_budget)
        self._lengths = Lengths()

    # -- admission and work ------------------------------------------------------------------

    def admit(self, completed: int, prompt_of: Callable[[int], Tokens]) -> None:
        """Let in every ordinal whose policy version exists after ``completed`` steps."""
        for ordinal in range(self._admitted, self.plan.admitted(completed)):
            entry = self._entries[ordinal] = _Entry(prompt_of(ordinal))
            self._taking.admit(ordinal)
            if len(entry.prompt) >= self.plan.limits.context:
                self.drop(ordinal, f"the prompt of {len(entry.prompt)} tokens leaves no room")
        self._admitted = max(self._admitted, self.plan.admitted(completed))

    def claim(
        self, worker: str, *, free: int, version: int | None, full: bool = False
    ) -> list[Assignment]:
        """Give ``worker`` up to ``free`` samples, the most urgent first; when pinned, of one
        version.

        ``version`` is that of its weights: when pinned, the one it is bound to because it is at
        work with it; None: any. One that is ``full`` gets only what the next step waits for, as
        all do under `pressure`.
        """
        pinned = self.plan.pinned
        restricted = full or self.pressure is not Pressure.NONE
        work: list[Assignment] = []
        for candidate in queue(self._candidates(only_awaited=restricted)):
            ordinal, sample = candidate.key
            if len(work) == free:
                break
            if pinned and version is not None and self.plan.version_of(ordinal) != version:
                continue
            entry = self._entries[ordinal]
            wanted = self._taking.begin(ordinal, version)
            version = wanted if pinned else version
            entry.claims[sample] = worker
            self._move(ordinal, Event.CLAIM)
            blank = Trajectory(ordinal=ordinal, sample=sample, prompt=entry.prompt)
            trajectory = entry.partial.get(sample, blank)
            entry.charged[sample] = trajectory.sampled
            work.append(Assignment(version=wanted, trajectory=trajectory))
        return work

    def hold(
        self, worker: str, keys: Iterable[SampleId], *, oldest: Mapping[SampleId, int] | None = None
    ) -> set[SampleId]:
        """Note that ``worker`` is at work on these; return those it should abandon.

        ``oldest`` is the oldest version that sampled, or will sample, tokens of each; it matters
        when steps take what arrives.
        """
        abandon: set[SampleId] = set()
        for ordinal, sample in keys:
            entry = self._entries.get(ordinal)
            over = entry is None or sample in entry.done or entry.state is State.DROPPED
            told = (oldest or {}).get((ordinal, sample))
            if (
                entry is None
                or over
                or entry.claims.get(sample, worker) != worker
                or not self._has_room(ordinal, told)
            ):
                abandon.add((ordinal, sample))
            else:
                entry.claims[sample] = worker
                self._move(ordinal, Event.CLAIM)
        return abandon

    def report(self, counts: Mapping[SampleId, int]) -> None:
        """Charge the token budget with what was sampled since it was last told."""
        for (ordinal, sample), count in counts.items():
            entry = self._entries.get(ordinal)
            if entry is not None:
                self._charge(entry, sample, count)

    def beyond_budget(self, worker: str) -> set[SampleId]:
        """Return what ``worker`` is at work on and should set aside until the next step."""
        if self._budget.left != 0:
            return set()
        awaited = self.awaited()
        return {key for key in self.claimed(worker) if key[0] not in awaited}

    def deliver(self, trajectory: Trajectory, *, again: bool = False) -> Verdict:
        """Take a finished sample. ``again`` marks one that may well have been taken before.

        When pinned, a duplicate must equal what was taken; one that differs is kept as a violation.
        """
        if not self.valid(trajectory):
            self.counters.rolled_back += 1
            self.recover(trajectory)
            return Verdict.ROLLED_BACK
        entry = self._entries.get(trajectory.ordinal)
        known = entry.done.get(trajectory.sample) if entry else None
        if known is not None or (entry is None and trajectory.ordinal < self._admitted):
            if self.plan.pinned and known and not _agree(known, trajectory):
                self._conflicts.append(f"sample {trajectory.key} was delivered in two versions")
            self.counters.redelivered += again
            self.counters.duplicates_refused += not again
            return Verdict.DUPLICATE
        if entry is None or entry.state is State.DROPPED:
            return Verdict.UNKNOWN
        if not self._has_room(trajectory.ordinal, trajectory.oldest):
            return Verdict.TOO_OLD
        self._charge(entry, trajectory.sample, trajectory.sampled)
        self._accept(entry, trajectory)
        self.counters.tokens_sampled += trajectory.sampled
        return Verdict.ACCEPTED

    def recover(self, trajectory: Trajectory) -> Verdict:
        """Take what is left of a sample: a finished one, or its beginning.

        Of one that goes on into a rolled-back future, what was sampled before that is taken.
        """
        trajectory = self._history(trajectory)
        if not trajectory.tokens:
            return Verdict.UNKNOWN
        if self.plan.limits.finished(trajectory):
            verdict = self.deliver(trajectory, again=True)
        else:
            verdict = self._keep(trajectory)
        if verdict is Verdict.ACCEPTED:
            self.counters.tokens_recovered += trajectory.sampled
        return verdict

    def set_aside(self, trajectory: Trajectory) -> Verdict:
        """Take back an unfinished sample that a living worker is to go on with later, or another.

        Like `recover`, but nothing was lost.
        """
        verdict = self._keep(self._history(trajectory))
        self.counters.samples_set_aside += verdict is Verdict.ACCEPTED
        return verdict

    def _keep(self, trajectory: Trajectory) -> Verdict:
        entry = self._entries.get(trajectory.ordinal)
        if entry is None or entry.state is State.DROPPED or not trajectory.tokens:
            return Verdict.UNKNOWN
        known = entry.partial.get(trajectory.sample)
        longer = known is None or _length(known) < _length(trajectory)
        if not longer or trajectory.sample in entry.done:
            return Verdict.DUPLICATE
        if not self._has_room(trajectory.ordinal, trajectory.oldest):
            return Verdict.TOO_OLD
        self._charge(entry, trajectory.sample, trajectory.sampled)
        entry.partial[trajectory.sample] = trajectory
        return Verdict.ACCEPTED

    def lose(self, worker: str) -> None:
        """Take back everything ``worker`` had claimed, which is gone."""
        self.counters.workers_lost += 1
        self._take_back(worker)

    def leave(self, worker: str) -> None:
        """Take back what ``worker`` had claimed, which has handed over what it had and goes."""
        self.counters.workers_left += 1
        self._take_back(worker)

    def _take_back(self, worker: str) -> None:
        for ordinal, entry in self._entries.items():
            lost = [sample for sample, holder in entry.claims.items() if holder == worker]
            for sample in lost:
                del entry.claims[sample]
            if lost and not entry.claims and entry.state is State.RUNNING:
                self._move(ordinal, Event.RELEASE)

    def abandon(self, worker: str, keys: Iterable[SampleId]) -> None:
        """Take back single claims of ``worker``, which no longer works on them."""
        for ordinal, sample in keys:
            entry = self._entries.get(ordinal)
            if entry is not None and entry.claims.get(sample) == worker:
                del entry.claims[sample]
                if not entry.claims:
                    self._move(ordinal, Event.RELEASE)

    def claimed(self, worker: str) -> set[SampleId]:
        """Return what ``worker`` is taken to be at work on."""
        return {
            (ordinal, sample)
            for ordinal, entry in self._entries.items()
            for sample, holder in entry.claims.items()
            if holder == worker
        }

    @property
    def admitted(self) -> int:
        """Number of ordinals ever admitted."""
        return self._admitted

    def prompt(self, ordinal: int) -> Tokens | None:
        """Return the prompt of an open ordinal, None for one that is not."""
        entry = self._entries.get(ordinal)
        return entry.prompt if entry else None

    @property
    def cuts(self) -> dict[int, int]:
        """The step that each generation was restored to."""
        return dict(self._cuts)

    def states(self) -> dict[int, State]:
        """Return the state of every open ordinal."""
        return {ordinal: entry.state for ordinal, entry in self._entries.items()}

    def samples(self) -> list[Trajectory]:
        """Return what there is of the samples of open ordinals, finished and partial."""
        return [
            trajectory
            for entry in self._entries.values()
            for trajectory in (*entry.done.values(), *entry.partial.values())
        ]

    def drop(self, ordinal: int, reason: str) -> None:
        """Give an ordinal up for good; its step trains without it."""
        self._move(ordinal, Event.DROP)
        self._entries[ordinal].reason = reason
        self._taking.complete(ordinal)

    # -- what holds work back ----------------------------------------------------------------

    @property
    def held_tokens(self) -> int:
        """Tokens of all samples that wait to go on, or to be trained."""
        return sum(entry.tokens for entry in self._entries.values())

    @property
    def pressure(self) -> Pressure:
        """Why only what the next step waits for is given out, if so."""
        most = self.plan.scheduling.ledger_tokens
        held = self.held_tokens if most is not None else 0
        return pressure(self._budget, held=held, most=most)

    def allowance(self, workers: int) -> int | None:
        """Return how many tokens each of ``workers`` may sample before it asks again."""
        return self._budget.share(workers)

    def awaited(self) -> set[int]:
        """Return the incomplete ordinals that the next step waits for."""
        return {ordinal for ordinal, steps in self._taking.urgency().items() if steps == 0}

    # -- training ----------------------------------------------------------------------------

    def batch(self, step: int) -> list[Trajectory] | None:
        """Return the samples of ``step`` in order, or None while some are missing.

        Those of groups that are taken again come last. Once returned, all of it is settled.
        """
        ordinals = self._taking.ordinals() if step == self.trained_steps else None
        if ordinals is None:
            return None
        again = self._replay.choose(step)
        return [
            *(sample for ordinal in ordinals for sample in self._samples(ordinal)),
            *(sample for ordinal in again for sample in self._replay.samples(ordinal)),
        ]

    def takes(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the ordinals that the next step takes, and those it takes again; none too early.

        What it takes is settled when its `batch` is.
        """
        ordinals = self._taking.ordinals()
        return ([], []) if ordinals is None else (ordinals, self._replay.choose(self.trained_steps))

    def train(self, step: int, rewards: Sequence[float] = ()) -> None:
        """Mark the ordinals of ``step`` as trained. Steps are trained in order, each once.

        ``rewards`` are those of its `batch`; only prioritized replay needs them.
        """
        if step != self.trained_steps:
            raise LedgerError(f"step {step} offered for training, next is {self.trained_steps}")
        ordinals = self._taking.ordinals()
        if ordinals is None:
            raise LedgerError(f"step {step} offered for training before its samples are complete")
        fresh = {ordinal: self._samples(ordinal) for ordinal in ordinals}
        told = iter(rewards)
        earned = {
            ordinal: [reward for _, reward in zip(samples, told, strict=False)]
            for ordinal, samples in fresh.items()
        }
        self.counters.groups_reused += len(self._replay.choose(step))
        self._replay.train(step, {o: each for o, each in fresh.items() if each}, earned)
        for ordinal in ordinals:
            entry = self._entries[ordinal]
            self._audit(step, entry)
            self._move(ordinal, Event.TRAIN)
            for sample in entry.done.values():
                self._lengths.note(len(entry.prompt), sample.sampled)
            del self._entries[ordinal]
        self._taking.train(ordinals)
        self._taken.append((step, tuple(ordinals)))
        self._budget.renew()
        self.trained_steps = step + 1

    @property
    def uses(self) -> dict[int, int]:
        """How many groups were trained on how often, where some are taken again; else empty."""
        return self._replay.uses

    def taken(self, step: int) -> tuple[int, ...] | None:
        """Return the ordinals that ``step`` took; None when that is too long ago, or to come."""
        return dict(self._taken).get(step)

    def released(self, protected: int) -> int:
        """Return the ordinal below which everything was trained by the first ``protected`` steps.

        What is asked for must not decrease.
        """
        return self._taking.released(protected)

    def check(self) -> list[str]:
        """Return every violation of what the ledger promises; empty when it holds."""
        found = [
            *self._conflicts,
            *self._taking.check(self._admitted),
            *self._replay.check(self.trained_steps),
        ]
        for ordinal, entry in self._entries.items():
            complete = len(entry.done) == self.plan.group
            if complete != (entry.state is State.READY):
                found.append(f"ordinal {ordinal} is {entry.state} with {len(entry.done)} samples")
            if both := entry.done.keys() & (entry.claims.keys() | entry.partial.keys()):
                found.append(f"ordinal {ordinal}: samples {sorted(both)} are done and running")
            if entry.claims and entry.state is not State.RUNNING:
                found.append(f"ordinal {ordinal} is {entry.state} with claims {entry.claims}")
        return found

    def counts(self) -> dict[str, int]:
        """Return how many ordinals are in each state."""
        counts = {state.value: 0 for state in State}
        counts[State.TRAINED] = self.trained_steps * self.plan.fresh
        for entry in self._entries.values():
            counts[entry.state] += 1
        return counts

    # -- generations -------------------------------------------------------------------------

    def resume(self, generation: int, *, restored: int) -> None:
        """Note that ``generation`` began at step ``restored``: older versions beyond are void."""
        if restored != self.trained_steps:
            raise LedgerError(
                f"generation {generation} resumes at step {restored} with a ledger of "
                f"{self.trained_steps} trained steps; they must come from one snapshot"
            )
        self._cuts[generation] = restored

    def current(self, *, generation: int, version: int) -> bool:
        """Whether weights ``version`` pulled in ``generation`` belong to the run's history."""
        return all(
            version <= restored for later, restored in self._cuts.items() if later > generation
        )

    def valid(self, trajectory: Trajectory) -> bool:
        """Whether no token was sampled by a version of a rolled-back future."""
        return all(
            self.current(generation=stamp.generation, version=stamp.version)
            for stamp in trajectory.stamps
        )

    def _history(self, trajectory: Trajectory) -> Trajectory:
        """Return the beginning that belongs to the run's history."""
        count = 0
        for stamp in trajectory.stamps:
            if not self.current(generation=stamp.generation, version=stamp.version):
                break
            count += stamp.count
        return trajectory.first(count)

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Json]:
        """Return the ledger as JSON values; each sample is one JSON text, to stay cheap."""
        samples = [msgspec.json.encode(trajectory).decode() for trajectory in self.samples()]
        return {
            "plan": msgspec.to_builtins(self.plan),
            "trained_steps": self.trained_steps,
            "admitted": self._admitted,
            "ordinals": sorted(self._entries),
            "prompts": [list(self._entries[o].prompt) for o in sorted(self._entries)],
            "taking": self._taking.state_dict(),
            "replay": self._replay.state_dict(),
            "taken": [[step, list(ordinals)] for step, ordinals in self._taken],
            "lengths": self._lengths.state_dict(),
            "dropped": {str(o): e.reason for o, e in self._entries.items() if e.reason},
            "samples": samples,
            "staleness_max": self.staleness_max,
            "cuts": {str(generation): step for generation, step in self._cuts.items()},
            "conflicts": list(self._conflicts),
            "counters": msgspec.to_builtins(self.counters),
        }

    def load_state_dict(self, state: dict[str, Json]) -> None:
        """Replace the content by what ``state_dict`` returned; what ran becomes pending.

        Raises ``LedgerError`` when the state belongs to a job of another shape.
        """
        plan = msgspec.convert(state["plan"], BatchPlan)
        if plan != self.plan:
            raise LedgerError(f"the saved ledger is of a job with {plan}, this one has {self.plan}")
        self.__init__(plan)  # type: ignore[misc]
        self.trained_steps, self._admitted = state["trained_steps"], state["admitted"]
        self.staleness_max = state["staleness_max"]
        self._cuts = {int(generation): step for generation, step in state["cuts"].items()}
        self._conflicts = list(state["conflicts"])
        for ordinal, prompt in zip(state["ordinals"], state["prompts"], strict=True):
            self._entries[ordinal] = _Entry(tuple(prompt))
        for ordinal, reason in state["dropped"].items():
            self.drop(int(ordinal), reason)
        for text in state["samples"]:
            trajectory = msgspec.json.decode(text, type=Trajectory)
            entry = self._entries[trajectory.ordinal]
            if plan.limits.finished(trajectory):
                self._accept(entry, trajectory)
            else:
                entry.partial[trajectory.sample] = trajectory
        self.counters = msgspec.convert(state["counters"], Counters)
        self._taking.load_state_dict(state["taking"])
        self._replay.load_state_dict(state["replay"])
        self._taken.extend((step, tuple(ordinals)) for step, ordinals in state["taken"])
        self._lengths = Lengths(state["lengths"])

    # -- inside ------------------------------------------------------------------------------

    def _candidates(self, *, only_awaited: bool) -> list[Candidate]:
        """Return the samples that may be given out."""
        return [
            Candidate(
                key=(ordinal, sample),
                urgency=steps,
                remaining=self._remaining(self._entries[ordinal], sample),
            )
            for ordinal, steps in self._taking.urgency().items()
            if not (only_awaited and steps)
            for sample in self._missing(self._entries[ordinal])
        ]

    def _remaining(self, entry: _Entry, sample: int) -> float:
        if self.plan.scheduling.claims == "prompt":
            return 0.0
        limits, begun = self.plan.limits, entry.partial.get(sample)
        most = min(limits.max_new_tokens, limits.context - len(entry.prompt))
        return remaining(
            self._lengths.expected(len(entry.prompt), most=most),
            done=[each.sampled for each in entry.done.values()],
            have=begun.sampled if begun else 0,
            most=most,
        )

    def _has_room(self, ordinal: int, oldest: int | None) -> bool:
        has_room = self._taking.has_room(ordinal, oldest)
        self.counters.samples_too_old += not has_room
        return has_room

    def _charge(self, entry: _Entry, sample: int, count: int) -> None:
        more = count - entry.charged.get(sample, 0)
        if more > 0:
            entry.charged[sample] = count
            self._budget.charge(more)

    def _samples(self, ordinal: int) -> list[Trajectory]:
        done = self._entries[ordinal].done
        return [done[sample] for sample in sorted(done)]

    def _missing(self, entry: _Entry) -> Sequence[int]:
        return [
            sample
            for sample in range(self.plan.group)
            if sample not in entry.done and sample not in entry.claims
        ]

    def _accept(self, entry: _Entry, trajectory: Trajectory) -> None:
        sample = trajectory.sample
        if not 0 <= sample < self.plan.group:
            raise LedgerError(f"sample {trajectory.key} is outside groups of {self.plan.group}")
        entry.done[sample] = trajectory
        entry.claims.pop(sample, None)
        entry.partial.pop(sample, None)
        self.counters.samples_accepted += 1
        if len(entry.done) == self.plan.group:
            self._move(trajectory.ordinal, Event.COMPLETE)
            self._taking.complete(trajectory.ordinal)
        elif not entry.claims and entry.state is State.RUNNING:
            self._move(trajectory.ordinal, Event.RELEASE)

    def _audit(self, step: int, entry: _Entry) -> None:
        """Check, and keep, what the trained samples say about themselves."""
        if entry.state is State.DROPPED:
            return
        if sorted(entry.done) != list(range(self.plan.group)):
            self._conflicts.append(f"step {step} trained on samples {sorted(entry.done)}")
        wanted = max(0, step - self.plan.eta)
        for trajectory in entry.done.values():
            by = trajectory.versions
            if by != {wanted} if self.plan.pinned else min(by) < wanted or max(by) > step:
                self._conflicts.append(
                    f"sample {trajectory.key} of step {step} was sampled by versions "
                    f"{sorted(by)}, wanted {wanted}" + ("" if self.plan.pinned else f" to {step}")
                )
            self.staleness_max = max(self.staleness_max, step - min(by))

    def _move(self, ordinal: int, event: Event) -> None:
        entry = self._entries[ordinal]
        after = TRANSITIONS.get((entry.state, event))
        if after is None:
            raise LedgerError(f"ordinal {ordinal} is {entry.state}: {event} is not possible")
        entry.state = after


def _length(trajectory: Trajectory) -> tuple[int, int]:
    """Return how far a trajectory has come, in tokens and replies."""
    return len(trajectory.tokens), len(trajectory.turns)


def _agree(one: Trajectory, other: Trajectory) -> bool:
    """Whether two deliveries of a sample tell the same.

    A call to an environment that was given up is not the same twice: it depends on the time.
    """
    if one.reason or other.reason:
        return True
    told = (other.tokens, other.logprobs, other.turns)
    return (one.tokens, one.logprobs, one.turns) == told
