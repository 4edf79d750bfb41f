"""A prompt's sampled tokens with their log-probabilities and policy versions. Pure values.

If an environment replies to the policy, the tokens of its observations stand among the sampled
ones, as context of the later ones. Log-probabilities and versions exist for the sampled tokens
alone, and `Turn` says which tokens are observed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.ckpt import checks
from holdfast.ckpt.errors import ArgumentError
from holdfast.ckpt.types import learn

SampleId = tuple[int, int]
"""(ordinal, sample): the prompt's number, and the sample's number in its group."""


class Stamp(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """``count`` consecutive tokens, sampled by one policy version in one generation."""

    generation: int
    version: int
    count: int


class Turn(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A turn of the policy that is over, with the environment's reply to it.

    ``end`` tokens stood before the reply (the prompt not counted), and ``observed`` tokens of the
    reply follow them. ``state`` is the environment's state after it, as JSON text. A ``reward``
    ends the episode; ``reason`` says why, if it was not the environment that ended it. ``then`` is
    the number of the policy that speaks next, ``rewards`` are those of each policy, in their order,
    where they differ.
    """

    end: int
    observed: int
    state: str
    reward: float | None = None
    reason: str = ""
    then: int = 0
    rewards: tuple[float, ...] = ()

    @property
    def stop(self) -> int:
        """Position of the next sampled token."""
        return self.end + self.observed


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """The answer so far to prompt ``ordinal``, number ``sample`` of its group.

    ``tokens`` are those after the prompt, observed ones included. ``logprobs`` are behavior
    log-probabilities, one per sampled token; the counts of ``stamps`` add up to the same number.
    ``turns`` are the turns that an environment has replied to.
    """

    ordinal: int
    sample: int
    prompt: Tokens
    tokens: Tokens = ()
    logprobs: tuple[float, ...] = ()
    stamps: tuple[Stamp, ...] = ()
    turns: tuple[Turn, ...] = ()

    def __post_init__(self) -> None:
        check_tokens(self, start=0)

    @property
    def key(self) -> SampleId:
        """(ordinal, sample)."""
        return self.ordinal, self.sample

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self.logprobs)

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        """The (start, end) ranges of the sampled tokens in ``tokens``, one per turn."""
        start = 0
        for turn in self.turns:
            yield start, turn.end
            start = turn.stop
        if start < len(self.tokens):
            yield start, len(self.tokens)

    @property
    def speakers(self) -> list[int]:
        """The number of the policy that spoke, for each of `spans`; the first one begins."""
        return [0, *(turn.then for turn in self.turns)][: sum(1 for _ in self.spans)]

    @property
    def speaker(self) -> int:
        """The number of the policy that has the turn in progress."""
        return self.turns[-1].then if self.turns else 0

    @property
    def turn_start(self) -> int:
        """Start of the turn in progress, as an index into ``tokens``."""
        return self.turns[-1].stop if self.turns else 0

    @property
    def state(self) -> str:
        """The environment's state as JSON text, ``null`` before its first reply."""
        return self.turns[-1].state if self.turns else "null"

    @property
    def reward(self) -> float | None:
        """The episode's reward; None if it is not over, or if no environment gives one."""
        return self.turns[-1].reward if self.turns else None

    def reward_of(self, policy: int) -> float | None:
        """Return the episode's reward for a policy, by its number."""
        if self.turns and self.turns[-1].rewards:
            return self.turns[-1].rewards[policy]
        return self.reward

    @property
    def reason(self) -> str:
        """Reason, if something other than the environment ended the episode; else empty."""
        return self.turns[-1].reason if self.turns else ""

    @property
    def token_versions(self) -> list[int]:
        """The policy version of each sampled token."""
        return [stamp.version for stamp in self.stamps for _ in range(stamp.count)]

    @property
    def versions(self) -> frozenset[int]:
        """The policy versions that sampled the tokens."""
        return frozenset(stamp.version for stamp in self.stamps)

    @property
    def oldest(self) -> int | None:
        """The oldest policy version that sampled a token; None without tokens."""
        return min(self.versions, default=None)

    def first(self, count: int) -> Trajectory:
        """Return the trajectory as it was before its sampled token number ``count`` (from 0)."""
        if count >= self.sampled:
            return self
        stop, turns = count, []
        for turn in self.turns:
            if turn.end > stop:
                break
            turns.append(turn)
            stop += turn.observed
        return msgspec.structs.replace(
            self,
            tokens=self.tokens[:stop],
            logprobs=self.logprobs[:count],
            stamps=cut_stamps(self.stamps, count),
            turns=tuple(turns),
        )

    def replied(
        self,
        observed: Tokens,
        *,
        state: str,
        reward: float | None = None,
        reason: str = "",
        then: int = 0,
        rewards: tuple[float, ...] = (),
    ) -> Trajectory:
        """Return the trajectory with the environment's reply to the turn that is over."""
        turn = Turn(
            end=len(self.tokens),
            observed=len(observed),
            state=state,
            reward=reward,
            reason=reason,
            then=then,
            rewards=rewards,
        )
        return msgspec.structs.replace(
            self, tokens=self.tokens + observed, turns=(*self.turns, turn)
        )


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one trajectory from position ``start`` on, as a worker's log stores them.

    Log-probabilities and stamps are those of its sampled tokens; ``turns`` are those that were
    replied to at or behind ``start``. Ids have up to 32 bits.
    """

    ordinal: int
    sample: int
    start: int
    tokens: Tokens
    logprobs: tuple[float, ...]
    stamps: tuple[Stamp, ...]
    turns: tuple[Turn, ...] = ()

    def whole(self, prompt: Tokens) -> Trajectory:
        """Return a delta from position 0 as a trajectory."""
        return Trajectory(
            ordinal=self.ordinal,
            sample=self.sample,
            prompt=prompt,
            tokens=self.tokens,
            logprobs=self.logprobs,
            stamps=self.stamps,
            turns=self.turns,
        )


_LIMITS: Final[Mapping[str, checks.Rule]] = {
    "end": checks.count(-checks.BEYOND, remedy="give the number of the token that ends a turn"),
    "context": checks.count(1, remedy="give 1 or more tokens"),
    "max_new_tokens": checks.count(1, remedy="give 1 or more tokens"),
    "turns": checks.flag(),
}


class TurnLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a turn: its token ``end``, and its number of tokens.

    Without an environment the first turn is the whole answer; with ``turns`` an environment says
    when the episode is over. Raises ``ArgumentError`` for numbers that no turn can have.
    """

    end: int
    context: int
    max_new_tokens: int
    turns: bool = False

    def __post_init__(self) -> None:
        checks.check_fields(self, _LIMITS, error=ArgumentError)

    def finished(self, trajectory: Trajectory) -> bool:
        """Say whether nothing more is to be sampled."""
        return trajectory.reward is not None if self.turns else self.turn_over(trajectory)

    def turn_over(self, trajectory: Trajectory) -> bool:
        """Say whether the policy's turn is over, so that a reply is due."""
        start = trajectory.turn_start
        count = len(trajectory.tokens) - start
        return count > 0 and self.over(len(trajectory.prompt) + start, count, trajectory.tokens[-1])

    def over(self, before: int, new_tokens: int, last: int) -> bool:
        """Say whether a turn of ``new_tokens`` tokens that ends in ``last`` is over.

        ``before`` tokens stand before it: the prompt and all earlier turns.
        """
        room = min(self.max_new_tokens, self.context - before)
        return last == self.end or new_tokens >= room


def check_tokens(each: Trajectory | Delta, *, start: int) -> None:
    """Raise ``ValueError`` if the parts do not fit the tokens from ``start`` on.

    The parts are turns, log-probabilities and stamps.
    """
    check_turns(each.turns, start=start, count=len(each.tokens))
    sampled = len(each.tokens) - sum(turn.observed for turn in each.turns)
    if len(each.logprobs) != sampled:
        raise ValueError(f"{sampled} tokens with {len(each.logprobs)} log-probabilities")
    if (stamped := sum(stamp.count for stamp in each.stamps)) != sampled:
        raise ValueError(f"{sampled} tokens with stamps for {stamped}")


def check_turns(turns: Sequence[Turn], *, start: int, count: int) -> None:
    """Raise ``ValueError`` for turns that cannot be those among ``count`` tokens from ``start``.

    Each turn has a sampled token; only that of the first may stand before ``start``. A reward ends
    the episode.
    """
    least, stop = max(1, start), start + count
    for turn in turns:
        if turn.end < least or turn.observed < 0 or turn.stop > stop:
            raise ValueError(
                f"a turn that ends at {turn.end}, with {turn.observed} tokens observed, within "
                f"those from {least} to {stop}"
            )
        if turn.reward is not None and turn.end < stop:
            raise ValueError(f"an episode that is over at {turn.end} has tokens up to {stop}")
        least = turn.stop + 1
    if any(turn.reward is not None for turn in turns[:-1]):
        raise ValueError("an episode with a reward that goes on")


def sampled_before(turns: Sequence[Turn], position: int) -> int:
    """Return how many of the first ``position`` tokens are sampled ones."""
    observed = (min(turn.observed, max(0, position - turn.end)) for turn in turns)
    return position - sum(observed)


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
