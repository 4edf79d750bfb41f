"""The protocol of sampling engines: streams of tokens, each with the weights that sampled it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


def room(limits: TurnLimits, *, prompt: int, ids: Sequence[int]) -> int:
    """Return how many more tokens the answer in ``ids`` may have; 0 if it is over."""
    answer = len(ids) - prompt
    if answer and limits.over(prompt, answer, ids[-1]):
        return 0
    return max(0, min(limits.max_new_tokens, limits.context - prompt) - answer)
