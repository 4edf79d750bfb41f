"""A prompt's sampled tokens with their log-probabilities and policy versions. Pure values."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from adapters.rl.tokens import Tokens
from ckpt.types import learn

SampleId = tuple[int, int]
"""(ordinal, sample): which of the samples of which prompt."""


class Stamp(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How many consecutive tokens were sampled in which generation by which policy version."""

    generation: int
    version: int
    count: int


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """The answer so far to prompt ``ordinal``, number ``sample`` of its group.

    ``logprobs`` are behavior log-probabilities, one per token of ``tokens`` (which excludes the
    prompt); the counts of ``stamps`` add up to the same number.
    """

    ordinal: int
    sample: int
    prompt: Tokens
    tokens: Tokens = ()
    logprobs: tuple[float, ...] = ()
    stamps: tuple[Stamp, ...] = ()

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.tokens):
            raise ValueError(
                f"{len(self.tokens)} tokens with {len(self.logprobs)} log-probabilities"
            )
        if (stamped := sum(stamp.count for stamp in self.stamps)) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens with stamps for {stamped}")

    @property
    def key(self) -> SampleId:
        """Return (ordinal, sample)."""
        return self.ordinal, self.sample

    @property
    def token_versions(self) -> list[int]:
        """Return the policy version of each token."""
        return [stamp.version for stamp in self.stamps for _ in range(stamp.count)]

    @property
    def versions(self) -> frozenset[int]:
        """Return the policy versions that sampled it."""
        return frozenset(stamp.version for stamp in self.stamps)

    @property
    def oldest(self) -> int | None:
        """Return the oldest policy version that sampled it, None where it has no tokens."""
        return min(self.versions, default=None)

    def first(self, count: int) -> Trajectory:
        """Return the trajectory as it was when it had ``count`` tokens."""
        if count >= len(self.tokens):
            return self
        return msgspec.structs.replace(
            self,
            tokens=self.tokens[:count],
            logprobs=self.logprobs[:count],
            stamps=cut_stamps(self.stamps, count),
        )


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one trajectory from position ``start`` on: what a worker's log is made of.

    Ids have up to 32 bits.
    """

    ordinal: int
    sample: int
    start: int
    tokens: Tokens
    logprobs: tuple[float, ...]
    stamps: tuple[Stamp, ...]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When an answer is over: by its token ``end``, or by how many it has."""

    end: int
    context: int
    max_new_tokens: int

    def finished(self, trajectory: Trajectory) -> bool:
        """Tell whether nothing more is to be sampled."""
        count = len(trajectory.tokens)
        return count > 0 and self.over(len(trajectory.prompt), count, trajectory.tokens[-1])

    def over(self, prompt_tokens: int, new_tokens: int, last: int) -> bool:
        """Tell whether an answer of ``new_tokens`` tokens that ends in ``last`` is over."""
        room = min(self.max_new_tokens, self.context - prompt_tokens)
        return last == self.end or new_tokens >= room


def cut_stamps(stamps: Sequence[Stamp], count: int) -> tuple[Stamp, ...]:
    """Return the stamps of the first ``count`` tokens."""
    kept: list[Stamp] = []
    for stamp in stamps:
        if count <= 0:
            break
        take = min(stamp.count, count)
        kept.append(Stamp(generation=stamp.generation, version=stamp.version, count=take))
        count -= take
    return tuple(kept)


def extend_stamps(stamps: Sequence[Stamp], more: Sequence[Stamp]) -> tuple[Stamp, ...]:
    """Append stamps, merging neighbours of one generation and version."""
    joined = list(stamps)
    for stamp in more:
        last = joined[-1] if joined else None
        if last and (last.generation, last.version) == (stamp.generation, stamp.version):
            count = last.count + stamp.count
            joined[-1] = Stamp(generation=last.generation, version=last.version, count=count)
        elif stamp.count:
            joined.append(stamp)
    return tuple(joined)


learn(globals())
