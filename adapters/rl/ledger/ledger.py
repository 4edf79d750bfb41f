"""The ledger: keeps every prompt ordinal in exactly one state, counts every sample once. Pure.

A step trains on ``groups`` ordinals of ``group`` samples each, in their order, each ordinal once.
By `ReplayConfig`, some of a step's groups are reused ones, which are counted apart. The ordinals of
step t are admitted once policy version max(0, t - eta) exists, and no older version may sample
them: staleness never exceeds eta, whatever fails, and in the first steps after a failure as well.
`Mode` decides whether that version samples them entirely, or any version from it on. An ordinal
moves by `states.TRANSITIONS`; a transition that is not listed there is an error.

With ``skip_equal`` a step passes over groups whose rewards are all equal, and takes further ones.
It does so by the rewards that the ledger recorded when it first looked at a complete group.

With `Order.ARRIVAL` a step takes the ordinals that are complete, by the rules of `order`, within
the same bound.

The ledger is part of the trainer's tracked state: a restored ledger and restored weights are one
consistent cut. Claims are not in it: after a restore, running ordinals are pending until their
workers announce them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from holdfast.adapters.rl.ledger.borrowing import Borrowing
from holdfast.adapters.rl.ledger.budget import Pressure, TokenBudget, pressure
from holdfast.adapters.rl.ledger.claim_order import ClaimCandidate, Lengths, queue, remaining
from holdfast.adapters.rl.ledger.counters import Books, Counters
from holdfast.adapters.rl.ledger.cuts import GenerationCuts
from holdfast.adapters.rl.ledger.group import Group, agree, audit, exhausted
from holdfast.adapters.rl.ledger.plan import Assignment, BatchPlan
from holdfast.adapters.rl.ledger.replay import Replay
from holdfast.adapters.rl.ledger.states import LedgerError, OrdinalEvent, OrdinalState
from holdfast.adapters.rl.ledger.taking import Taking
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory
from holdfast.ckpt.errors import ArgumentError
from holdfast.ckpt.types import Json

_RECORDED_STEPS = 64
_CONFLICTS_KEPT = 100


class DeliveryVerdict(StrEnum):
    """The result of delivering a sample."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    ROLLED_BACK = "rolled_back"
    TOO_OLD = "too_old"
    UNKNOWN = "unknown"


class Ledger:
    """The ledger of the module's docstring. Not safe to share between threads without a lock.

    ``policies`` are the names of those that speak; each has a book of its tokens (`Books`).
    ``reward_of`` gives the reward of a finished sample; a plan that `skips` groups needs it. Raises
    ``ArgumentError`` without it.
    """

    def __init__(
        self,
        plan: BatchPlan,
        *,
        policies: Sequence[str] = ("",),
        reward_of: Callable[[Trajectory], float] | None = None,
    ) -> None:
        if plan.skips and reward_of is None:
            raise ArgumentError(
                f"skip_equal={plan.scheduling.skip_equal} needs the rewards of samples before they "
                "are trained on: set it to None"
            )
        self.plan, self._reward_of = plan, reward_of
        self.books = Books(policies)
        self.counters = Counters()
        self.trained_steps = 0
        self.staleness_max = 0
        self._groups: dict[int, Group] = {}
        self._admitted = 0
        self._cuts = GenerationCuts()
        self._conflicts: list[str] = []
        self._taking = Taking.by(
            plan.scheduling.order, groups=plan.fresh, eta=plan.eta, skips=plan.skips
        )
        self._prompt_of: Callable[[int], Tokens] | None = None
        self._unjudged: list[int] = []
        self._replay = Replay(plan.replay, count=plan.replay.reused(plan.groups))
        self._taken: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=_RECORDED_STEPS)
        self._budget = TokenBudget(limit=plan.scheduling.token_budget)
        self._lengths = Lengths()
        self.borrowing = Borrowing()

    # -- admission and work ------------------------------------------------------------------

    def admit(self, completed: int, prompt_of: Callable[[int], Tokens]) -> None:
        """Admit every ordinal whose policy version exists after ``completed`` steps."""
        self._prompt_of = prompt_of
        upto = self.plan.admitted(completed, taken=self._taking.taken if self.plan.skips else None)
        while self._admitted < upto:
            self._admit_next(prompt_of)

    def _admit_next(self, prompt_of: Callable[[int], Tokens], *, now: bool = False) -> None:
        ordinal = self._admitted
        group = self._open(ordinal, prompt_of(ordinal))
        self._taking.admit(ordinal, now=now)
        if len(group.prompt) >= self.plan.limits.context:
            self.drop(ordinal, f"the prompt of {len(group.prompt)} tokens leaves no room")
        self._admitted += 1

    def _open(self, ordinal: int, prompt: Tokens) -> Group:
        group = Group(ordinal=ordinal, prompt=prompt, size=self.plan.group)
        self._groups[ordinal] = group
        return group

    def claim(
        self, worker: str, *, free: int, version: int | None, full: bool = False
    ) -> list[Assignment]:
        """Give ``worker`` up to ``free`` samples, the most urgent first.

        ``version`` is that of the worker's weights; None: any. When pinned, it is the version that
        the worker is bound to by its current work, and all samples are of one version. A ``full``
        worker gets only samples that the next step waits for; under `pressure` all workers do.
        """
        pinned = self.plan.pinned
        restricted = full or self.pressure is not Pressure.NONE
        work: list[Assignment] = []
        for candidate in queue(self._candidates(only_awaited=restricted)):
            ordinal, sample = candidate.key
            if len(work) == free:
                break
            wanted = self._taking.begin(ordinal, version)
            if pinned and version is not None and wanted != version:
                continue
            group = self._groups[ordinal]
            version = wanted if pinned else version
            group.claim(sample, worker)
            trajectory = group.begun(sample)
            group.charged[sample] = trajectory.sampled
            work.append(Assignment(version=wanted, trajectory=trajectory))
        return work

    def hold(
        self, worker: str, keys: Iterable[SampleId], *, oldest: Mapping[SampleId, int] | None = None
    ) -> set[SampleId]:
        """Record that ``worker`` works on these samples; return those it should abandon.

        ``oldest`` maps a sample to the oldest version that sampled, or will sample, its tokens. It
        matters when steps take groups by arrival. If that version does not exist yet, then all of
        the tokens belong to a future that was rolled back, and the sample is abandoned.
        """
        abandon: set[SampleId] = set()
        for ordinal, sample in keys:
            group = self._groups.get(ordinal)
            over = group is None or sample in group.done or group.state is OrdinalState.DROPPED
            reported = (oldest or {}).get((ordinal, sample))
            if (
                group is None
                or over
                or group.claims.get(sample, worker) != worker
                or (reported is not None and reported > self.trained_steps)
                or not self._has_room(ordinal, reported)
            ):
                abandon.add((ordinal, sample))
            else:
                group.claim(sample, worker)
        return abandon

    def report(self, counts: Mapping[SampleId, int]) -> None:
        """Charge the token budget with the tokens sampled since the last report.

        ``counts`` maps a sample to the total of its sampled tokens.
        """
        for (ordinal, sample), count in counts.items():
            group = self._groups.get(ordinal)
            if group is not None:
                self._charge(group, sample, count)

    def beyond_budget(self, worker: str) -> set[SampleId]:
        """Return the claims of ``worker`` that it should set aside until the next step."""
        if self._budget.left != 0:
            return set()
        awaited = self.awaited()
        return {key for key in self.claimed(worker) if key[0] not in awaited}

    def deliver(self, trajectory: Trajectory, *, again: bool = False) -> DeliveryVerdict:
        """Take a finished sample. ``again``: it was probably taken before.

        When pinned, a duplicate must equal the first delivery; a different one is recorded as a
        violation.
        """
        if not self.valid(trajectory):
            self.counters.rolled_back += 1
            self.recover(trajectory)
            return DeliveryVerdict.ROLLED_BACK
        group = self._groups.get(trajectory.ordinal)
        known = group.done.get(trajectory.sample) if group else None
        if known is not None or (group is None and trajectory.ordinal < self._admitted):
            if self.plan.pinned and known and not agree(known, trajectory):
                self._note([f"sample {trajectory.key} was delivered in two versions"])
            self.counters.redelivered += again
            self.counters.duplicates_refused += not again
            return DeliveryVerdict.DUPLICATE
        if group is None or group.state is OrdinalState.DROPPED:
            return DeliveryVerdict.UNKNOWN
        if not self._has_room(trajectory.ordinal, trajectory.oldest):
            return DeliveryVerdict.TOO_OLD
        self._charge(group, trajectory.sample, trajectory.sampled)
        self._accept(group, trajectory)
        self.counters.tokens_sampled += trajectory.sampled
        return DeliveryVerdict.ACCEPTED

    def recover(self, trajectory: Trajectory) -> DeliveryVerdict:
        """Take the remains of a sample: a finished one, or its beginning.

        Of a sample that continues into a rolled-back future, the tokens before that are taken.
        """
        trajectory = self._cuts.history(trajectory)
        if not trajectory.tokens:
            return DeliveryVerdict.UNKNOWN
        if self.plan.limits.finished(trajectory):
            verdict = self.deliver(trajectory, again=True)
        else:
            verdict = self._keep(trajectory)
        if verdict is DeliveryVerdict.ACCEPTED:
            self.counters.tokens_recovered += trajectory.sampled
        return verdict

    def set_aside(self, trajectory: Trajectory) -> DeliveryVerdict:
        """Take back an unfinished sample from a living worker; it or another continues it later.

        Like `recover`, but nothing was lost.
        """
        verdict = self._keep(self._cuts.history(trajectory))
        self.counters.samples_set_aside += verdict is DeliveryVerdict.ACCEPTED
        return verdict

    def _keep(self, trajectory: Trajectory) -> DeliveryVerdict:
        group = self._groups.get(trajectory.ordinal)
        if group is None or group.state is OrdinalState.DROPPED or not trajectory.tokens:
            return DeliveryVerdict.UNKNOWN
        if not group.longer(trajectory):
            return DeliveryVerdict.DUPLICATE
        if not self._has_room(trajectory.ordinal, trajectory.oldest):
            return DeliveryVerdict.TOO_OLD
        self._charge(group, trajectory.sample, trajectory.sampled)
        group.partial[trajectory.sample] = trajectory
        return DeliveryVerdict.ACCEPTED

    def lose(self, worker: str) -> None:
        """Release everything that ``worker`` had claimed: the worker is lost."""
        self.counters.workers_lost += 1
        self._take_back(worker)

    def leave(self, worker: str) -> None:
        """Release the claims of ``worker``: it has handed over its samples and leaves."""
        self.counters.workers_left += 1
        self._take_back(worker)

    def _take_back(self, worker: str) -> None:
        for group in self._groups.values():
            group.release(group.claimed_by(worker))

    def abandon(self, worker: str, keys: Iterable[SampleId]) -> None:
        """Release single claims of ``worker``, which no longer works on them."""
        for ordinal, sample in keys:
            group = self._groups.get(ordinal)
            if group is not None:
                group.release({sample} & group.claimed_by(worker))

    def claimed(self, worker: str) -> set[SampleId]:
        """Return the samples that ``worker`` has claimed."""
        return {
            (ordinal, sample)
            for ordinal, group in self._groups.items()
            for sample in group.claimed_by(worker)
        }

    @property
    def admitted(self) -> int:
        """Number of ordinals ever admitted."""
        return self._admitted

    def prompt(self, ordinal: int) -> Tokens | None:
        """Return the prompt of an open ordinal; None if it is not open."""
        group = self._groups.get(ordinal)
        return group.prompt if group else None

    def oldest(self, ordinal: int) -> int:
        """Return the oldest version that may sample an open ordinal; when pinned, the only one."""
        return self._taking.begin(ordinal, None)

    @property
    def cuts(self) -> dict[int, int]:
        """The step that each generation was restored to, as far as it still matters."""
        return dict(self._cuts.steps)

    def states(self) -> dict[int, OrdinalState]:
        """Return the state of every open ordinal."""
        return {ordinal: group.state for ordinal, group in self._groups.items()}

    def samples(self) -> list[Trajectory]:
        """Return the samples held of open ordinals, finished and partial."""
        return [
            trajectory
            for group in self._groups.values()
            for trajectory in (*group.done.values(), *group.partial.values())
        ]

    def drop(self, ordinal: int, reason: str) -> None:
        """Give an ordinal up for good; its step trains without it."""
        group = self._groups[ordinal]
        group.move(OrdinalEvent.DROP)
        group.reason = reason
        self._taking.complete(ordinal, trains=False)

    # -- groups that teach nothing ------------------------------------------------------------

    @property
    def stuck(self) -> str:
        """The reason why the next step can never be filled; empty if there is none."""
        if not self._taking.short or self.trained_steps >= self.plan.steps:
            return ""
        return exhausted(self._groups.values(), self.plan, step=self.trained_steps)

    def rewards(self) -> dict[int, tuple[float, ...]]:
        """Return the recorded rewards of every open ordinal that has been judged by them."""
        return {ordinal: each.rewards for ordinal, each in self._groups.items() if each.rewards}

    def _judge_complete(self) -> None:
        """Record the rewards of complete groups; skip those where all are equal; fill the step."""
        unjudged, self._unjudged = self._unjudged, []
        for ordinal in unjudged:
            group = self._groups[ordinal]
            assert self._reward_of is not None
            group.judge(map(self._reward_of, group.samples))
            self._taking.complete(ordinal, trains=group.trains)
        if self._prompt_of is not None and self.trained_steps < self.plan.steps:
            while self._taking.short and not self.stuck:
                self._admit_next(self._prompt_of, now=True)

    # -- limits on new work -------------------------------------------------------------------

    @property
    def held_tokens(self) -> int:
        """Tokens of all finished and partial samples that wait to be continued or trained."""
        return sum(group.tokens for group in self._groups.values())

    @property
    def pressure(self) -> Pressure:
        """The limit that restricts new work to what the next step waits for, if any."""
        most = self.plan.scheduling.ledger_tokens
        held_tokens = self.held_tokens if most is not None else 0
        return pressure(self._budget, held_tokens=held_tokens, most=most)

    def allowance(self, workers: int) -> int | None:
        """Return how many tokens each of ``workers`` may sample before it asks again."""
        return self._budget.share(workers)

    def awaited(self) -> set[int]:
        """Return the incomplete ordinals that the next step waits for."""
        return {ordinal for ordinal, steps in self._taking.urgency().items() if steps == 0}

    # -- training ----------------------------------------------------------------------------

    def batch(self, step: int) -> list[Trajectory] | None:
        """Return the samples of ``step`` in order, or None while some are missing.

        The samples of reused groups come last. Once returned, all of them are settled.
        """
        if self.plan.skips and step == self.trained_steps:
            self._judge_complete()
        ordinals = self._taking.ordinals() if step == self.trained_steps else None
        if ordinals is None:
            return None
        again = self._replay.choose(step)
        return [
            *(sample for ordinal in ordinals for sample in self._samples(ordinal)),
            *(sample for ordinal in again for sample in self._replay.samples(ordinal)),
        ]

    def _samples(self, ordinal: int) -> list[Trajectory]:
        """Return the samples of an open ordinal that its step trains on."""
        group = self._groups[ordinal]
        return group.samples if group.trains else []

    def takes(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the ordinals that the next step takes, and those it reuses; empty if too early.

        They are settled once the step's `batch` is.
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
        values = iter(rewards)
        earned = {
            ordinal: [reward for _, reward in zip(samples, values, strict=False)]
            for ordinal, samples in fresh.items()
        }
        self.counters.groups_reused += len(self._replay.choose(step))
        self._replay.train(step, {o: each for o, each in fresh.items() if each}, earned)
        for ordinal in ordinals:
            group = self._groups.pop(ordinal)
            wanted = self.oldest(ordinal) if self.plan.pinned else self.plan.oldest_at(step)
            self._note(audit(group, self.plan, step=step, wanted=wanted))
            self.counters.groups_skipped += group.state is OrdinalState.SKIPPED
            group.move(OrdinalEvent.TRAIN)
            self.books.add(fresh[ordinal])
            for sample in group.done.values():
                self._lengths.note(len(group.prompt), sample.sampled)
            for sample in fresh[ordinal]:
                self.staleness_max = max(self.staleness_max, step - min(sample.versions))
        self._taking.train(ordinals)
        self._taken.append((step, tuple(ordinals)))
        self.counters.groups_borrowed += self.borrowing.train(step)
        self._budget.renew()
        self.trained_steps = step + 1

    @property
    def uses(self) -> dict[int, int]:
        """Number of groups by how often they were trained on; empty unless groups are reused."""
        return self._replay.uses

    def taken(self, step: int) -> tuple[int, ...] | None:
        """Return the ordinals that ``step`` took; None if that is too long ago or in the future."""
        return dict(self._taken).get(step)

    def released(self, protected: int) -> int:
        """Return the ordinal below which everything was trained by the first ``protected`` steps.

        Successive calls must not decrease ``protected``.
        """
        return self._taking.released(protected)

    def check(self) -> list[str]:
        """Return every violation of the ledger's invariants; empty if there is none."""
        found = [
            *self._conflicts,
            *self._taking.check(self._admitted),
            *self._replay.check(self.trained_steps),
        ]
        for group in self._groups.values():
            found += group.check()
        return found

    def counts(self) -> dict[str, int]:
        """Return how many ordinals are in each state."""
        counts = {state.value: 0 for state in OrdinalState}
        counts[OrdinalState.TRAINED] = self.trained_steps * self.plan.fresh
        counts[OrdinalState.BORROWED] = self.borrowing.waiting
        counts[OrdinalState.SKIPPED] = self.counters.groups_skipped
        without = self._taking.taken - counts[OrdinalState.TRAINED]
        counts[OrdinalState.DROPPED] = without - self.counters.groups_skipped
        for group in self._groups.values():
            counts[group.state] += 1
        return counts

    # -- generations -------------------------------------------------------------------------

    def resume(self, generation: int, *, restored: int) -> None:
        """Record that ``generation`` began at step ``restored`` (see `GenerationCuts.begin`)."""
        if restored != self.trained_steps:
            raise LedgerError(
                f"generation {generation} resumes at step {restored} with a ledger of "
                f"{self.trained_steps} trained steps; they must come from one snapshot"
            )
        self._cuts.begin(
            generation, restored=restored, oldest=self.plan.oldest_from(self.trained_steps)
        )

    def current(self, *, generation: int, version: int) -> bool:
        """Say whether weights ``version`` pulled in ``generation`` belong to the run's history."""
        return self._cuts.current(generation=generation, version=version)

    def valid(self, trajectory: Trajectory) -> bool:
        """Say whether every token was sampled by a version in the run's history."""
        return self._cuts.valid(trajectory)

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Json]:
        """Return the ledger as JSON values; each sample is one JSON text, to stay cheap."""
        samples = [msgspec.json.encode(trajectory).decode() for trajectory in self.samples()]
        return {
            "plan": msgspec.to_builtins(self.plan),
            "trained_steps": self.trained_steps,
            "admitted": self._admitted,
            "ordinals": sorted(self._groups),
            "prompts": [list(self._groups[o].prompt) for o in sorted(self._groups)],
            "taking": self._taking.state_dict(),
            "replay": self._replay.state_dict(),
            "taken": [[step, list(ordinals)] for step, ordinals in self._taken],
            "lengths": self._lengths.state_dict(),
            "borrowing": self.borrowing.state_dict(),
            "books": self.books.state_dict(),
            "rewards": {str(o): list(each) for o, each in self.rewards().items()},
            "dropped": {str(o): each.reason for o, each in self._groups.items() if each.reason},
            "samples": samples,
            "staleness_max": self.staleness_max,
            "cuts": {str(generation): step for generation, step in self._cuts.steps.items()},
            "conflicts": list(self._conflicts),
            "counters": msgspec.to_builtins(self.counters),
        }

    def load_state_dict(self, state: dict[str, Json]) -> None:
        """Replace the content by what ``state_dict`` returned; running ordinals become pending.

        Raises ``LedgerError`` when the state belongs to a job of another shape.
        """
        plan = msgspec.convert(state["plan"], BatchPlan)
        if plan != self.plan:
            raise LedgerError(f"the saved ledger is of a job with {plan}, this one has {self.plan}")
        self.__init__(  # type: ignore[misc]
            plan, policies=self.books.names, reward_of=self._reward_of
        )
        self.trained_steps, self._admitted = state["trained_steps"], state["admitted"]
        self.staleness_max = state["staleness_max"]
        self._cuts = GenerationCuts(
            {int(generation): step for generation, step in state["cuts"].items()}
        )
        self._conflicts = list(state["conflicts"])
        for ordinal, prompt in zip(state["ordinals"], state["prompts"], strict=True):
            self._open(ordinal, tuple(prompt))
        for ordinal, reason in state["dropped"].items():
            self.drop(int(ordinal), reason)
        for text in state["samples"]:
            trajectory = msgspec.json.decode(text, type=Trajectory)
            group = self._groups[trajectory.ordinal]
            if plan.limits.finished(trajectory):
                self._accept(group, trajectory)
            else:
                group.partial[trajectory.sample] = trajectory
        for ordinal, rewards in state.get("rewards", {}).items():
            self._groups[int(ordinal)].judge(rewards)
            self._unjudged.remove(int(ordinal))
        self.counters = msgspec.convert(state["counters"], Counters)
        self._taking.load_state_dict(state["taking"])
        self._replay.load_state_dict(state["replay"])
        self._taken.extend((step, tuple(ordinals)) for step, ordinals in state["taken"])
        self._lengths = Lengths(state["lengths"])
        if "borrowing" in state:  # snapshots of older versions have none
            self.borrowing.load_state_dict(state["borrowing"])
        if "books" in state:
            self.books.load_state_dict(state["books"])

    # -- inside ------------------------------------------------------------------------------

    def _note(self, violations: Sequence[str]) -> None:
        """Keep violations, the first ones of a job: they are part of every snapshot."""
        self._conflicts += violations[: _CONFLICTS_KEPT - len(self._conflicts)]

    def _candidates(self, *, only_awaited: bool) -> list[ClaimCandidate]:
        """Return the samples that may be given out."""
        return [
            ClaimCandidate(
                key=(ordinal, sample),
                urgency=steps,
                remaining=self._remaining(self._groups[ordinal], sample),
            )
            for ordinal, steps in self._taking.urgency().items()
            if not (only_awaited and steps)
            for sample in self._groups[ordinal].missing
        ]

    def _remaining(self, group: Group, sample: int) -> float:
        if self.plan.scheduling.claims == "prompt":
            return 0.0
        limits = self.plan.limits
        most = min(limits.max_new_tokens, limits.context - len(group.prompt))
        return remaining(
            self._lengths.expected(len(group.prompt), most=most),
            done=[each.sampled for each in group.done.values()],
            have=group.partial[sample].sampled if sample in group.partial else 0,
            most=most,
        )

    def _has_room(self, ordinal: int, oldest: int | None) -> bool:
        has_room = self._taking.has_room(ordinal, oldest)
        self.counters.samples_too_old += not has_room
        return has_room

    def _charge(self, group: Group, sample: int, count: int) -> None:
        more = count - group.charged.get(sample, 0)
        if more > 0:
            group.charged[sample] = count
            self._budget.charge(more)

    def _accept(self, group: Group, trajectory: Trajectory) -> None:
        complete = group.accept(trajectory)
        self.counters.samples_accepted += 1
        if complete and self.plan.skips:
            self._unjudged.append(group.ordinal)
        elif complete:
            self._taking.complete(group.ordinal)
