"""The ledger: every prompt ordinal in exactly one state, every sample counted once. Pure.

A step trains on ``groups`` ordinals of ``group`` samples each, in their order. The ordinals of step
t are admitted once policy version max(0, t - eta) exists, and no older one may sample them: so
staleness never exceeds eta, whatever fails, and in the first steps after it as well. By `Mode` that
version samples them entirely, or any from it on. An ordinal moves by `TRANSITIONS`; what is not
listed there is an error.

The ledger is part of the trainer's tracked state: a restored ledger and restored weights are one
consistent cut. Claims are not in it; after a restore what ran is pending until its workers
announce it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from adapters.rl.tokens import Tokens
from adapters.rl.trajectory import Limits, SampleId, Trajectory
from ckpt.types import Json
from elastic.errors import ElasticError


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

    ``eta`` is the largest staleness, 0 in mode ``SYNC``.
    """

    groups: int
    group: int
    eta: int
    steps: int
    limits: Limits
    mode: Mode = Mode.FIXED_LAG

    @property
    def pinned(self) -> bool:
        """Whether a sample is of one version from its first token to its last."""
        return self.mode is not Mode.BOUNDED

    def step_of(self, ordinal: int) -> int:
        """Return the step (0-based) that trains on ``ordinal``."""
        return ordinal // self.groups

    def version_of(self, ordinal: int) -> int:
        """Return the oldest policy version that may sample ``ordinal``; when pinned, the one."""
        return max(0, self.step_of(ordinal) - self.eta)

    def admitted(self, completed: int) -> int:
        """Return how many ordinals may be sampled once ``completed`` steps are done."""
        return self.groups * min(completed + self.eta + 1, self.steps)


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Work for a rollout worker: a sample to start or to go on with, by ``version`` or a newer."""

    version: int
    trajectory: Trajectory


class Counters(msgspec.Struct, kw_only=True):
    """What happened to tokens and samples; a lower bound after a rollback of the ledger.

    ``tokens_recovered`` came out of a lost worker's log; ``tokens_resampled`` had been reported
    by a lost worker and were not in its log.
    """

    samples_accepted: int = 0
    tokens_sampled: int = 0
    tokens_recovered: int = 0
    tokens_resampled: int = 0
    duplicates_refused: int = 0
    redelivered: int = 0
    rolled_back: int = 0
    workers_lost: int = 0


@dataclass(slots=True)
class _Entry:
    prompt: Tokens
    state: State = State.PENDING
    reason: str = ""
    done: dict[int, Trajectory] = field(default_factory=dict)
    partial: dict[int, Trajectory] = field(default_factory=dict)
    claims: dict[int, str] = field(default_factory=dict)


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

    # -- admission and work ------------------------------------------------------------------

    def admit(self, completed: int, prompt_of: Callable[[int], Tokens]) -> None:
        """Let in every ordinal whose policy version exists after ``completed`` steps."""
        for ordinal in range(self._admitted, self.plan.admitted(completed)):
            entry = self._entries[ordinal] = _Entry(prompt_of(ordinal))
            if len(entry.prompt) >= self.plan.limits.context:
                self.drop(ordinal, f"the prompt of {len(entry.prompt)} tokens leaves no room")
        self._admitted = max(self._admitted, self.plan.admitted(completed))

    def claim(self, worker: str, *, free: int, version: int | None) -> list[Assignment]:
        """Give ``worker`` up to ``free`` samples, the earliest first; when pinned, of one version.

        ``version`` is the one it is bound to because it is at work with it; None: any.
        """
        pinned = self.plan.pinned
        work: list[Assignment] = []
        for ordinal in sorted(self._entries):
            entry = self._entries[ordinal]
            wanted = self.plan.version_of(ordinal)
            if entry.state not in (State.PENDING, State.RUNNING):
                continue
            if pinned and version is not None and wanted != version:
                continue
            for sample in self._missing(entry):
                if len(work) == free:
                    return work
                version = wanted
                entry.claims[sample] = worker
                self._move(ordinal, Event.CLAIM)
                blank = Trajectory(ordinal=ordinal, sample=sample, prompt=entry.prompt)
                work.append(Assignment(version=wanted, trajectory=entry.partial.get(sample, blank)))
        return work

    def hold(self, worker: str, keys: Iterable[SampleId]) -> set[SampleId]:
        """Note that ``worker`` is at work on these; return those it should abandon."""
        abandon: set[SampleId] = set()
        for ordinal, sample in keys:
            entry = self._entries.get(ordinal)
            over = entry is None or sample in entry.done or entry.state is State.DROPPED
            if entry is None or over or entry.claims.setdefault(sample, worker) != worker:
                abandon.add((ordinal, sample))
            else:
                self._move(ordinal, Event.CLAIM)
        return abandon

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
        if known is not None or trajectory.ordinal < self.trained_steps * self.plan.groups:
            told = (trajectory.tokens, trajectory.logprobs)
            if self.plan.pinned and known and (known.tokens, known.logprobs) != told:
                self._conflicts.append(f"sample {trajectory.key} was delivered in two versions")
            self.counters.redelivered += again
            self.counters.duplicates_refused += not again
            return Verdict.DUPLICATE
        if entry is None or entry.state is State.DROPPED:
            return Verdict.UNKNOWN
        self._accept(entry, trajectory)
        self.counters.tokens_sampled += len(trajectory.tokens)
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
            if verdict is Verdict.ACCEPTED:
                self.counters.tokens_recovered += len(trajectory.tokens)
            return verdict
        entry = self._entries.get(trajectory.ordinal)
        if entry is None or entry.state is State.DROPPED:
            return Verdict.UNKNOWN
        known = entry.partial.get(trajectory.sample)
        longer = known is None or len(known.tokens) < len(trajectory.tokens)
        if not longer or trajectory.sample in entry.done:
            return Verdict.DUPLICATE
        entry.partial[trajectory.sample] = trajectory
        self.counters.tokens_recovered += len(trajectory.tokens)
        return Verdict.ACCEPTED

    def lose(self, worker: str) -> None:
        """Take back everything ``worker`` had claimed."""
        self.counters.workers_lost += 1
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

    def drop(self, ordinal: int, reason: str) -> None:
        """Give an ordinal up for good; its step trains without it."""
        self._move(ordinal, Event.DROP)
        self._entries[ordinal].reason = reason

    # -- training ----------------------------------------------------------------------------

    def batch(self, step: int) -> list[Trajectory] | None:
        """Return the samples of ``step`` in order, or None while some are missing."""
        ordinals = self._ordinals(step)
        entries = [self._entries.get(ordinal) for ordinal in ordinals]
        if any(e is None or e.state not in (State.READY, State.DROPPED) for e in entries):
            return None
        return [e.done[s] for e in entries if e for s in sorted(e.done)]

    def train(self, step: int) -> None:
        """Mark the ordinals of ``step`` as trained. Steps are trained in order, each once."""
        if step != self.trained_steps:
            raise LedgerError(f"step {step} offered for training, next is {self.trained_steps}")
        for ordinal in self._ordinals(step):
            self._audit(step, self._entries[ordinal])
            self._move(ordinal, Event.TRAIN)
            del self._entries[ordinal]
        self.trained_steps = step + 1

    def check(self) -> list[str]:
        """Return every violation of what the ledger promises; empty when it holds."""
        found = list(self._conflicts)
        first = self.trained_steps * self.plan.groups
        if sorted(self._entries) != list(range(first, self._admitted)):
            found.append(f"open ordinals are not exactly {first} to {self._admitted - 1}")
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
        counts[State.TRAINED] = self.trained_steps * self.plan.groups
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
        samples = [
            msgspec.json.encode(trajectory).decode()
            for entry in self._entries.values()
            for trajectory in (*entry.done.values(), *entry.partial.values())
        ]
        return {
            "plan": msgspec.to_builtins(self.plan),
            "trained_steps": self.trained_steps,
            "admitted": self._admitted,
            "prompts": [list(self._entries[o].prompt) for o in sorted(self._entries)],
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
        first = self.trained_steps * plan.groups
        for ordinal, prompt in enumerate(state["prompts"], first):
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

    # -- inside ------------------------------------------------------------------------------

    def _ordinals(self, step: int) -> range:
        return range(step * self.plan.groups, (step + 1) * self.plan.groups)

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
