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

from collections.abc import Callable, Sequence

import msgspec

from holdfast.adapters.rl.ledger.claim_order import Lengths
from holdfast.adapters.rl.ledger.counters import Counters
from holdfast.adapters.rl.ledger.cuts import GenerationCuts
from holdfast.adapters.rl.ledger.group import audit, exhausted
from holdfast.adapters.rl.ledger.plan import BatchPlan
from holdfast.adapters.rl.ledger.states import LedgerError, OrdinalEvent, OrdinalState
from holdfast.adapters.rl.ledger.work.claims import LedgerClaims
from holdfast.adapters.rl.ledger.work.deliveries import LedgerDeliveries
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.ckpt.types import Json


class Ledger(LedgerClaims, LedgerDeliveries):
    """The ledger of the module's docstring. Not safe to share between threads without a lock.

    ``policies`` are the names of those that speak; each has a book of its tokens (`Books`).
    ``reward_of`` gives the reward of a finished sample; a plan that `skips` groups needs it. Raises
    ``ArgumentError`` without it.
    """

    # -- admission and work ------------------------------------------------------------------

    def admit(self, completed: int, prompt_of: Callable[[int], Tokens]) -> None:
        """Admit every ordinal whose policy version exists after ``completed`` steps."""
        self._prompt_of = prompt_of
        upto = self.plan.admitted(completed, taken=self._taking.taken if self.plan.skips else None)
        while self._admitted < upto:
            self._admit_next(prompt_of)

    def _admit_next(self, prompt_of: Callable[[int], Tokens], *, now: bool = False) -> None:
        ordinal = self._admitted
        self._taking.admit(ordinal, now=now)
        group = self._groups.open(ordinal, prompt_of(ordinal))
        if len(group.prompt) >= self.plan.limits.context:
            self.drop(ordinal, f"the prompt of {len(group.prompt)} tokens leaves no room")
        self._admitted += 1

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
        oldest = self._taking.begin(ordinal, None)
        self._groups.touch(ordinal)
        return oldest

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
        self._groups.drop(ordinal, reason)
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
            if not group.trains:
                self._groups.waiting.reorder()
        if self._prompt_of is not None and self.trained_steps < self.plan.steps:
            while self._taking.short and not self.stuck:
                self._admit_next(self._prompt_of, now=True)

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
            group = self._groups.close(ordinal)
            pinned = self.plan.pinned
            wanted = self._taking.begin(ordinal, None) if pinned else self.plan.oldest_at(step)
            self._note(audit(group, self.plan, step=step, wanted=wanted))
            self.counters.groups_skipped += group.state is OrdinalState.SKIPPED
            group.move(OrdinalEvent.TRAIN)
            self.books.add(fresh[ordinal])
            for sample in group.done.values():
                self._lengths.note(len(group.prompt), sample.sampled)
            for sample in fresh[ordinal]:
                self.staleness_max = max(self.staleness_max, step - min(sample.versions))
        self._groups.waiting.reorder()
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

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Json]:
        """Return the ledger as JSON values; each sample is one JSON text, to stay cheap.

        The text of a finished sample is made once: each step has a snapshot.
        """
        samples = [text for group in self._groups.values() for text in group.encoded()]
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
            self._groups.open(ordinal, tuple(prompt))
        for ordinal, reason in state["dropped"].items():
            self._groups.drop(int(ordinal), reason)
        judged = {int(ordinal): each for ordinal, each in state.get("rewards", {}).items()}
        complete: list[int] = []
        for text in state["samples"]:
            trajectory = msgspec.json.decode(text, type=Trajectory)
            if not plan.limits.finished(trajectory):
                self._groups.keep(trajectory)
            elif self._groups.accept(trajectory) and trajectory.ordinal not in judged:
                complete.append(trajectory.ordinal)
        self._unjudged = complete if plan.skips else []
        for ordinal, rewards in judged.items():
            self._groups[ordinal].judge(rewards)
        self.counters = msgspec.convert(state["counters"], Counters)
        self._taking.load_state_dict(state["taking"])
        self._replay.load_state_dict(state["replay"])
        self._taken.extend((step, tuple(ordinals)) for step, ordinals in state["taken"])
        self._lengths = Lengths(state["lengths"])
        if "borrowing" in state:  # snapshots of older versions have none
            self.borrowing.load_state_dict(state["borrowing"])
        if "books" in state:
            self.books.load_state_dict(state["books"])
