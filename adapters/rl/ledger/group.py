"""An open prompt with its samples: the finished, the partial and the claimed ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from holdfast.adapters.rl.ledger.plan import BatchPlan
from holdfast.adapters.rl.ledger.states import LedgerError, OrdinalEvent, OrdinalState, moved
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import Trajectory


@dataclass(slots=True, kw_only=True)
class Group:
    """The samples of ``ordinal`` by number; ``size`` of them make it complete.

    ``charged`` maps a sample to the tokens that the token budget was charged for it; ``reason``
    says why the ordinal was dropped. ``rewards`` are those of the samples, in order, if groups are
    judged by them. ``texts`` has finished samples as JSON texts, for the next snapshots.
    """

    ordinal: int
    prompt: Tokens
    size: int
    state: OrdinalState = OrdinalState.PENDING
    reason: str = ""
    done: dict[int, Trajectory] = field(default_factory=dict)
    partial: dict[int, Trajectory] = field(default_factory=dict)
    claims: dict[int, str] = field(default_factory=dict)
    charged: dict[int, int] = field(default_factory=dict)
    rewards: tuple[float, ...] = ()
    texts: dict[int, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens held, prompts excluded."""
        return sum(len(each.tokens) for each in (*self.done.values(), *self.partial.values()))

    @property
    def samples(self) -> list[Trajectory]:
        """The finished samples, in order."""
        return [self.done[sample] for sample in sorted(self.done)]

    @property
    def trains(self) -> bool:
        """True unless its step goes without it."""
        return self.state not in (OrdinalState.DROPPED, OrdinalState.SKIPPED)

    @property
    def missing(self) -> Sequence[int]:
        """The samples that are neither finished nor claimed."""
        numbers = range(self.size)
        return [n for n in numbers if n not in self.done and n not in self.claims]

    def move(self, event: OrdinalEvent) -> None:
        """Change the state by ``event``."""
        self.state = moved(self.ordinal, self.state, event)

    def begun(self, sample: int) -> Trajectory:
        """Return a sample to continue from: its partial trajectory, or a blank one."""
        blank = Trajectory(ordinal=self.ordinal, sample=sample, prompt=self.prompt)
        return self.partial.get(sample, blank)

    def claim(self, sample: int, worker: str) -> None:
        """Record that ``worker`` works on a sample."""
        self.claims[sample] = worker
        self.move(OrdinalEvent.CLAIM)

    def release(self, samples: Iterable[int]) -> None:
        """Release claims: no worker works on these samples any more."""
        given = set(samples) & self.claims.keys()
        for sample in given:
            del self.claims[sample]
        if given and not self.claims and self.state is OrdinalState.RUNNING:
            self.move(OrdinalEvent.RELEASE)

    def accept(self, trajectory: Trajectory) -> bool:
        """Take a finished sample; return whether it completes the group."""
        sample = trajectory.sample
        if not 0 <= sample < self.size:
            raise LedgerError(f"sample {trajectory.key} is outside groups of {self.size}")
        self.done[sample] = trajectory
        self.claims.pop(sample, None)
        self.partial.pop(sample, None)
        if len(self.done) == self.size:
            self.move(OrdinalEvent.COMPLETE)
            return True
        if not self.claims and self.state is OrdinalState.RUNNING:
            self.move(OrdinalEvent.RELEASE)
        return False

    def judge(self, rewards: Iterable[float]) -> None:
        """Record the rewards of a complete group; it is skipped if all of them are equal."""
        self.rewards = tuple(rewards)
        if len(set(self.rewards)) == 1:
            self.move(OrdinalEvent.SKIP)

    def encoded(self) -> Iterator[str]:
        """Yield the finished and the partial samples as JSON texts."""
        for sample, trajectory in self.done.items():
            if sample not in self.texts:
                self.texts[sample] = _encoded(trajectory)
            yield self.texts[sample]
        yield from map(_encoded, self.partial.values())

    def longer(self, trajectory: Trajectory) -> bool:
        """Say whether an unfinished sample is longer than what is held of it."""
        known = self.partial.get(trajectory.sample)
        if trajectory.sample in self.done:
            return False
        return known is None or _length(known) < _length(trajectory)

    def check(self) -> list[str]:
        """Return every violation of the group's invariants; empty if there is none."""
        found = []
        if (len(self.done) == self.size) != (self.state in _COMPLETE):
            found.append(f"ordinal {self.ordinal} is {self.state} with {len(self.done)} samples")
        if both := self.done.keys() & (self.claims.keys() | self.partial.keys()):
            found.append(f"ordinal {self.ordinal}: samples {sorted(both)} are done and running")
        if self.claims and self.state is not OrdinalState.RUNNING:
            found.append(f"ordinal {self.ordinal} is {self.state} with claims {self.claims}")
        return found


_COMPLETE: Final = (OrdinalState.READY, OrdinalState.SKIPPED)


def audit(group: Group, plan: BatchPlan, *, step: int, wanted: int) -> list[str]:
    """Return what is wrong with a group that ``step`` trains on, judged by its samples.

    ``wanted`` is the oldest version that may have sampled it; when pinned, the only one.
    """
    if not group.trains:
        return []
    found = []
    if sorted(group.done) != list(range(plan.group)):
        found.append(f"step {step} trained on samples {sorted(group.done)}")
    for trajectory in group.done.values():
        by = trajectory.versions
        if by != {wanted} if plan.pinned else min(by) < wanted or max(by) > step:
            found.append(
                f"sample {trajectory.key} of step {step} was sampled by versions "
                f"{sorted(by)}, wanted {wanted}" + ("" if plan.pinned else f" to {step}")
            )
    return found


def exhausted(groups: Iterable[Group], plan: BatchPlan, *, step: int) -> str:
    """Return why ``step``, short of groups, must not look for more; empty while it may.

    ``groups`` are the open ones; ``skip_equal`` bounds how many of them may have nothing to train.
    """
    limit = plan.scheduling.skip_equal or 0
    passed = sum(not group.trains for group in groups)
    if passed < limit * plan.fresh:
        return ""
    return (  # the same text whoever was faster, so without the number of those passed over
        f"step {step + 1} passed over {limit * plan.fresh} groups, which skip_equal={limit} "
        "allows, as all rewards of each are equal and teach nothing: make the task easier or "
        "harder for this policy, reward parts of an answer, or raise scheduling.skip_equal"
    )


def agree(one: Trajectory, other: Trajectory) -> bool:
    """Say whether two deliveries of a sample have the same content.

    An environment call that was given up need not repeat: it depends on the time.
    """
    if one.reason or other.reason:
        return True
    delivered = (other.tokens, other.logprobs, other.turns)
    return (one.tokens, one.logprobs, one.turns) == delivered


def _encoded(trajectory: Trajectory) -> str:
    return msgspec.json.encode(trajectory).decode()


def _length(trajectory: Trajectory) -> tuple[int, int]:
    """Return a trajectory's length in tokens and replies."""
    return len(trajectory.tokens), len(trajectory.turns)
