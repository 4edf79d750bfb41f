"""The protocol of sampling engines: streams of tokens, each with the weights that sampled it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from holdfast.adapters.rl.samples.trajectory import SampleId, TurnLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlace:
    """The place of an answer: its prompt's number, its own in the group, and its first token.

    ``prompt`` is the number of tokens before the answer. With ``seed`` the place of a token is all
    that its noise depends on.
    """

    seed: int
    ordinal: int
    sample: int
    prompt: int

    @property
    def key(self) -> SampleId:
        """(ordinal, sample)."""
        return self.ordinal, self.sample


class SampledToken(NamedTuple):
    """A token with its log-probability under policy ``version``, which sampled it."""

    token: int
    logprob: float
    version: int


class SamplingEngine(Protocol):
    """Samples answers, several at a time; every engine passes the same contract tests.

    All methods may be called from several threads.
    """

    @property
    def capacity(self) -> int:
        """Number of answers that it samples at a time."""

    def generate(self, ids: Sequence[int], place: TokenPlace) -> Generator[SampledToken]:
        """Yield the tokens that follow ``ids``, the prompt and the begin of its answer.

        It ends with the answer, by the engine's limits. If it cannot, the tokens so far count, and
        it raises ``PeerError`` for a lost or hanging engine and ``CorruptError`` for an answer that
        is none: another engine may go on from there. Raises ``ConfigError`` for what no other try
        would mend. Closing it frees the place in the engine.
        """

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Sample with these weights from now on; also the open streams, where that is supported."""

    def pause(self) -> None:
        """Sample no token until `resume`; streams stay open and wait."""

    def resume(self) -> None:
        """Go on after `pause`."""


@runtime_checkable
class RunsOfTokens(Protocol):
    """An engine that also yields tokens in the runs in which they come, which cost less each."""

    def generate_runs(
        self, ids: Sequence[int], place: TokenPlace
    ) -> Generator[Sequence[SampledToken]]:
        """Yield the tokens of `SamplingEngine.generate`, one or more at a time."""


def runs_of(
    engine: SamplingEngine, ids: Sequence[int], place: TokenPlace
) -> Generator[Sequence[SampledToken]]:
    """Yield what an engine samples after ``ids``, in runs if it has them, else token by token.

    A class that overrides `generate` alone means what that yields.
    """
    if isinstance(engine, RunsOfTokens) and _depth(engine, "generate_runs") <= _depth(
        engine, "generate"
    ):
        yield from engine.generate_runs(ids, place)
        return
    with contextlib.closing(engine.generate(ids, place)) as tokens:
        for token in tokens:
            yield (token,)


def _depth(engine: object, method: str) -> int:
    """Return how many classes lie before the one that defines a method."""
    return next(n for n, each in enumerate(type(engine).__mro__) if method in vars(each))


def room(limits: TurnLimits, *, prompt: int, ids: Sequence[int]) -> int:
    """Return how many more tokens the answer in ``ids`` may have; 0 if it is over."""
    answer = len(ids) - prompt
    if answer and limits.over(prompt, answer, ids[-1]):
        return 0
    return max(0, min(limits.max_new_tokens, limits.context - prompt) - answer)
