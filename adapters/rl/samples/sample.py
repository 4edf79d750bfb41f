"""An answer in progress, as user-written sampling loops see it."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

import msgspec
import numpy as np
from torch import Tensor

from holdfast.adapters.rl.samples.noise import choose, uniform
from holdfast.adapters.rl.samples.tokens import Tokens
from holdfast.adapters.rl.samples.trajectory import (
    Delta,
    Stamp,
    Trajectory,
    TurnLimits,
    extend_stamps,
)
from holdfast.elastic.errors import ConfigError


class SampleSink(Protocol):
    """Logs the tokens added to samples, and delivers the samples."""

    @property
    def limits(self) -> TurnLimits:
        """The limits that end an answer."""

    @property
    def seed(self) -> int:
        """Seed of the noise that picks tokens."""

    @property
    def generation(self) -> int:
        """Generation of the weights that sample now."""

    def added(self, sample: Sample, delta: Delta) -> None:
        """Take the tokens that were added to a sample."""

    def together(self) -> AbstractContextManager[object]:
        """Return a block at whose end what was added in it is logged, by one record."""
        return nullcontext()


@contextmanager
def logged_together(samples: Iterable[Sample]) -> Iterator[None]:
    """Log the tokens that are added to these samples in the block together, at its end."""
    keepers = {id(each._keeper): each._keeper for each in samples}
    with ExitStack() as stack:
        for keeper in keepers.values():
            stack.enter_context(keeper.together())
        yield


class Sample:
    """An answer in progress; the tokens added to it are logged, and survive the process.

    It is answer number ``sample`` to prompt ``ordinal``. ``version`` is the policy version to
    sample it with: the number of completed steps, unless the plan asks for an older one (see
    `Rollouts.weights`).
    """

    def __init__(self, keeper: SampleSink, start: Trajectory, *, version: int) -> None:
        self._keeper, self._start, self.version = keeper, start, version
        self._is_given_up = False
        self._tokens, self._logprobs = list(start.tokens), list(start.logprobs)
        self._stamps = start.stamps

    @property
    def ordinal(self) -> int:
        """Number of the prompt."""
        return self._start.ordinal

    @property
    def sample(self) -> int:
        """Number of the sample in its group."""
        return self._start.sample

    @property
    def seed(self) -> int:
        """Seed of the noise that picks tokens: the run's."""
        return self._keeper.seed

    @property
    def prompt(self) -> Tokens:
        """The prompt's tokens."""
        return self._start.prompt

    @property
    def tokens(self) -> Tokens:
        """The tokens of the answer so far."""
        return tuple(self._tokens)

    @property
    def sampled(self) -> int:
        """Number of sampled tokens: those of the answer without what was replied."""
        return len(self._logprobs)

    @property
    def text(self) -> Tokens:
        """The tokens of the prompt and of the answer so far."""
        return (*self.prompt, *self._tokens)

    @property
    def finished(self) -> bool:
        """True if nothing more is to be added: it is complete, or was given up."""
        tokens, limits = self._tokens, self._keeper.limits
        over = bool(tokens) and limits.over(len(self.prompt), len(tokens), tokens[-1])
        return over or self._is_given_up

    @property
    def given_up(self) -> bool:
        """True if another worker has it, or its weights were rolled back.

        That happens only in sampling processes of the user's own. Tokens added to it are dropped.
        """
        return self._is_given_up

    def give_up(self) -> None:
        """Mark it as no longer wanted."""
        self._is_given_up = True

    def noise(self) -> float:
        """Return a number in [0, 1) for the next token, the same in every process at any time."""
        at = (self.ordinal, self.sample, len(self.prompt) + len(self._tokens))
        places = (np.array([each], dtype=np.int64) for each in at)
        return float(uniform(self._keeper.seed, *places)[0])

    def draw(self, logits: Tensor) -> int:
        """Return a token drawn from ``logits`` [vocabulary], or log-probabilities, by `noise`."""
        row = logits.detach().float().cpu().numpy()[None]
        return int(choose(row, np.array([self.noise()]))[0])

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add sampled tokens with their log-probabilities, which are kept as float32.

        Raises ``ConfigError`` for what is no such number, and once the sample is finished.
        """
        count = len(tokens)
        if count != len(logprobs):
            raise ConfigError(f"{count} tokens with {len(logprobs)} log-probabilities")
        if self._is_given_up:
            return
        if self.finished:
            raise ConfigError(f"sample {self._start.key} is finished; nothing can be added to it")
        numbers, kept = self._checked(tokens, logprobs)
        if any(map(math.isnan, kept)):
            raise ConfigError(f"sample {self._start.key}: a log-probability is NaN")
        delta = Delta(
            ordinal=self.ordinal,
            sample=self.sample,
            start=len(self._tokens),
            tokens=numbers,
            logprobs=kept,
            stamps=(Stamp(generation=self._keeper.generation, version=self.version, count=count),),
        )
        self._tokens += delta.tokens
        self._logprobs += kept
        self._stamps = extend_stamps(self._stamps, delta.stamps)
        self._keeper.added(self, delta)

    def _checked(
        self, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> tuple[Tokens, tuple[float, ...]]:
        """Return the tokens as integers of 64 bits, and the log-probabilities as float32."""
        count = len(tokens)
        try:
            numbers = struct.unpack(f"<{count}q", struct.pack(f"<{count}q", *tokens))
            return numbers, struct.unpack(f"<{count}f", struct.pack(f"<{count}f", *logprobs))
        except (struct.error, OverflowError, TypeError) as error:
            raise ConfigError(
                f"sample {self._start.key}: {error}; give the tokens as integers of 64 bits, and "
                "the log-probabilities as float32"
            ) from error

    def trajectory(self) -> Trajectory:
        """Return the answer so far."""
        return msgspec.structs.replace(
            self._start,
            tokens=self.tokens,
            logprobs=tuple(self._logprobs),
            stamps=self._stamps,
        )
