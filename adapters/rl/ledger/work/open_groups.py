"""The open groups by ordinal, with the claims of each worker and the number of tokens held. Pure.

Every change of a group goes through here, so that no question about one worker, or about the next
sample to give out, has to look at all groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from holdfast.adapters.rl.ledger.group import Group
from holdfast.adapters.rl.ledger.states import OrdinalEvent
from holdfast.adapters.rl.ledger.work.waiting import Waiting
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory


class OpenGroups(Mapping[int, Group]):
    """The open groups of ``size`` samples each; ``waiting`` has those that may be given out."""

    def __init__(self, *, size: int, waiting: Waiting) -> None:
        self.waiting = waiting
        self.held_tokens = 0
        self._size = size
        self._groups: dict[int, Group] = {}
        self._claimed: dict[str, set[SampleId]] = {}

    def __getitem__(self, ordinal: int) -> Group:
        return self._groups[ordinal]

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def open(self, ordinal: int, prompt: Tokens) -> Group:
        """Add a group without samples."""
        group = Group(ordinal=ordinal, prompt=prompt, size=self._size)
        self._groups[ordinal] = group
        self.waiting.touch(group)
        return group

    def close(self, ordinal: int) -> Group:
        """Remove a group that is trained, and return it."""
        group = self._groups.pop(ordinal)
        self.held_tokens -= group.tokens
        for sample, worker in group.claims.items():
            self._unclaim(worker, (ordinal, sample))
        self.waiting.forget(ordinal)
        return group

    def drop(self, ordinal: int, reason: str) -> None:
        """Give a group up; its step trains without it."""
        group = self._groups[ordinal]
        group.move(OrdinalEvent.DROP)
        group.reason = reason
        self.waiting.touch(group)

    def touch(self, ordinal: int) -> None:
        """Record that a group's place among the waiting ones may have changed."""
        self.waiting.touch(self._groups[ordinal])

    # -- claims ----------------------------------------------------------------------------------

    def claim(self, key: SampleId, worker: str) -> None:
        """Record that ``worker`` works on a sample."""
        group = self._groups[key[0]]
        group.claim(key[1], worker)
        self._claimed.setdefault(worker, set()).add(key)
        self.waiting.touch(group)

    def claimed(self, worker: str) -> set[SampleId]:
        """Return the samples that ``worker`` has claimed."""
        return set(self._claimed.get(worker, ()))

    def release(self, worker: str, keys: Iterable[SampleId]) -> None:
        """Release those of the claims of ``worker`` that are among ``keys``."""
        for ordinal, sample in self.claimed(worker).intersection(keys):
            group = self._groups[ordinal]
            group.release([sample])
            self._unclaim(worker, (ordinal, sample))
            self.waiting.touch(group)

    def _unclaim(self, worker: str, key: SampleId) -> None:
        claimed = self._claimed[worker]
        claimed.discard(key)
        if not claimed:
            del self._claimed[worker]

    # -- samples ---------------------------------------------------------------------------------

    def accept(self, trajectory: Trajectory) -> bool:
        """Take a finished sample; return whether it completes its group."""
        group, sample = self._groups[trajectory.ordinal], trajectory.sample
        worker, begun = group.claims.get(sample), group.partial.get(sample)
        complete = group.accept(_sharing(trajectory, group))
        self.held_tokens += len(trajectory.tokens) - (len(begun.tokens) if begun else 0)
        if worker is not None:
            self._unclaim(worker, trajectory.key)
        self.waiting.touch(group)
        return complete

    def keep(self, trajectory: Trajectory) -> None:
        """Hold an unfinished sample in the place of a shorter one."""
        group, sample = self._groups[trajectory.ordinal], trajectory.sample
        begun = group.partial.get(sample)
        group.partial[sample] = _sharing(trajectory, group)
        self.held_tokens += len(trajectory.tokens) - (len(begun.tokens) if begun else 0)
        self.waiting.touch(group)


def _sharing(trajectory: Trajectory, group: Group) -> Trajectory:
    """Return a sample with the prompt of its group in the place of its own, equal one."""
    if trajectory.prompt is group.prompt or trajectory.prompt != group.prompt:
        return trajectory
    return msgspec.structs.replace(trajectory, prompt=group.prompt)
