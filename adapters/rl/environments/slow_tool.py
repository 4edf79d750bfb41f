"""A simulated tool: its latencies and numbers of turns are long-tailed.

Every random value is a hash of the place where it is used, so that two jobs get the same latencies,
lengths and turns, whatever fails in between. A policy that rarely ends a turn by itself samples
``max_new_tokens`` in each, so that the number of turns determines the number of its tokens.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from holdfast.adapters.rl.environments.base import Action, Observation

_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_VOWELS: Final = frozenset("aeiou")
_PROMPT_LETTERS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowTool:
    """Replies with letters after a while; the reward is the share of vowels in the policy's text.

    Latencies, numbers of turns and lengths of observations are log-normal, with the given mean;
    ``…_tail`` is the standard deviation of their logarithm (0: always the mean; at 1.5 the slowest
    in a hundred takes 11 times the mean). ``longest_s``, ``most_turns`` and ``most_letters`` bound
    them.
    """

    seed: int = 0
    latency_s: float = 0.05
    latency_tail: float = 1.0
    longest_s: float = 10.0
    turns: float = 3.0
    turns_tail: float = 0.5
    most_turns: int = 16
    letters: float = 4.0
    letters_tail: float = 0.5
    most_letters: int = 32
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        for name in ("latency_s", "latency_tail", "turns_tail", "letters", "letters_tail"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, needed: 0 or more")
        if self.turns < 1:
            raise ValueError(f"turns is {self.turns}, needed: at least 1")
        if self.most_turns < 1:
            raise ValueError(f"most_turns is {self.most_turns}, needed: at least 1")

    def prompt(self, ordinal: int) -> str:
        """Return some letters."""
        return self._letters("prompt", ordinal, count=_PROMPT_LETTERS) + ">"

    def respond(self, action: Action) -> Observation:
        """Take a while, then reply; with the reward in the last turn of the episode."""
        self.sleep(self.latency_of(action))
        vowels, letters = action.state or (0, 0)
        vowels += sum(letter in _VOWELS for letter in action.text)
        letters += len(action.text)
        if action.turn + 1 >= self.turns_of(action.ordinal, action.sample):
            return Observation(reward=vowels / letters if letters else 0.0)
        where = (action.ordinal, action.sample, action.turn)
        drawn = self._draw("length", *where, mean=self.letters, tail=self.letters_tail)
        count = min(round(drawn), self.most_letters)
        text = self._letters("observation", *where, count=count)
        return Observation(text=text + ">", state=[vowels, letters])

    def latency_of(self, action: Action) -> float:
        """Return how many seconds the reply to a turn takes."""
        where = (action.ordinal, action.sample, action.turn)
        drawn = self._draw("latency", *where, mean=self.latency_s, tail=self.latency_tail)
        return min(drawn, self.longest_s)

    def turns_of(self, ordinal: int, sample: int) -> int:
        """Return how many turns an episode has."""
        drawn = self._draw("turns", ordinal, sample, mean=self.turns, tail=self.turns_tail)
        return min(max(1, round(drawn)), self.most_turns)

    def _draw(self, what: str, *where: int, mean: float, tail: float) -> float:
        if mean == 0 or tail == 0:
            return mean
        share = (int.from_bytes(self._hash(what, *where)[:6]) + 0.5) / (1 << 48)
        return mean * math.exp(tail * NormalDist().inv_cdf(share) - tail * tail / 2)

    def _letters(self, what: str, *where: int, count: int) -> str:
        drawn = bytearray()
        while len(drawn) < count:
            drawn += self._hash(what, *where, len(drawn))
        return "".join(_LETTERS[byte % len(_LETTERS)] for byte in drawn[:count])

    def _hash(self, what: str, *where: int) -> bytes:
        return hashlib.blake2s(repr((self.seed, what, *where)).encode()).digest()
