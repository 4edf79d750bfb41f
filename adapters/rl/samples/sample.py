"""An answer in the making, as a loop of one's own sees it."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
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
    """Who logs what is added to samples, and hands them in."""

    @property
    def limits(self) -> TurnLimits:
        """When an answer is over."""

    @property
    def seed(self) -> int:
        """Of the noise that picks tokens."""

    @property
    def generation(self) -> int:
        """In which the weights that sample now were there."""

    def added(self, sample: Sample, delta: Delta) -> None:
        """Take what was added to a sample."""


class Sample:
    """An answer in the making: what is added to it is logged, and outlives the process.

    It is the answer number ``sample`` to prompt ``ordinal``. ``version`` is the policy version to
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
        """Which prompt."""
        return self._start.ordinal

    @property
    def sample(self) -> int:
        """Which of the samples of its group."""
        return self._start.sample

    @property
    def prompt(self) -> Tokens:
        """The prompt's tokens."""
        return self._start.prompt

    @property
    def tokens(self) -> Tokens:
        """What there is of the answer."""
        return tuple(self._tokens)

    @property
    def text(self) -> Tokens:
        """The prompt and what there is of the answer."""
        return (*self.prompt, *self._tokens)

    @property
    def finished(self) -> bool:
        """Whether nothing more is to be added: it is complete, or was given up."""
        tokens, limits = self._tokens, self._keeper.limits
        over = bool(tokens) and limits.over(len(self.prompt), len(tokens), tokens[-1])
        return over or self._is_given_up

    @property
    def given_up(self) -> bool:
        """Whether somebody else is at work on it, or its weights were rolled back.

        That happens in sampling processes of one's own alone. What is added to it is dropped.
        """
        return self._is_given_up

    def give_up(self) -> None:
        """Note that it is not wanted any more."""
        self._is_given_up = True

    def noise(self) -> float:
        """Return a number in [0, 1) for the next token, the same whoever samples it, whenever."""
        at = (self.ordinal, self.sample, len(self.prompt) + len(self._tokens))
        places = (np.array([each], dtype=np.int64) for each in at)
        return float(uniform(self._keeper.seed, *places)[0])

    def draw(self, logits: Tensor) -> int:
        """Return a token drawn from ``logits`` [vocabulary], or log-probabilities, by `noise`."""
        row = logits.detach().float().cpu().numpy()[None]
        return int(choose(row, np.array([self.noise()]))[0])

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add sampled tokens with their log-probabilities, which are kept as float32."""
        count = len(tokens)
        if count != len(logprobs):
            raise ConfigError(f"{count} tokens with {len(logprobs)} log-probabilities")
        if self._is_given_up:
            return
        if self.finished:
            raise ConfigError(f"sample {self._start.key} is finished; nothing can be added to it")
        kept = struct.unpack(f"<{count}f", struct.pack(f"<{count}f", *logprobs))
        if any(map(math.isnan, kept)):
            raise ConfigError(f"sample {self._start.key}: a log-probability is NaN")
        delta = Delta(
            ordinal=self.ordinal,
            sample=self.sample,
            start=len(self._tokens),
            tokens=tuple(map(int, tokens)),
            logprobs=kept,
            stamps=(Stamp(generation=self._keeper.generation, version=self.version, count=count),),
        )
        self._tokens += delta.tokens
        self._logprobs += kept
        self._stamps = extend_stamps(self._stamps, delta.stamps)
        self._keeper.added(self, delta)

    def trajectory(self) -> Trajectory:
        """Return the answer as it stands."""
        return msgspec.structs.replace(
            self._start,
            tokens=self.tokens,
            logprobs=tuple(self._logprobs),
            stamps=self._stamps,
        )
