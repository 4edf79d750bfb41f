"""Tasks: prompts as a pure function of their ordinal, and the rewards of answers.

A hash of a prompt's text decides whether it belongs to the held-out split; training ordinals skip
those prompts, so the splits stay disjoint even if the underlying data set repeats prompts.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Protocol

import msgspec

from holdfast.adapters.rl.environments.base import HELD_OUT
from holdfast.elastic.errors import ConfigError

_HELD_OUT_SHARE = 26 / 256
_TRAIN_STRIDE = 16
"""Items reserved per training ordinal; the first that is not held out is its prompt."""

_HELD_OUT_START = 1 << 29
_HELD_OUT_STRIDE = 256
"""Items reserved per held-out ordinal; a tenth of all are held out."""

_CYCLE = 1 << 25


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its right answer."""

    prompt: str
    answer: str


class TaskSource(Protocol):
    """An endless, indexable supply of problems that also scores attempts."""

    def item(self, index: int) -> Problem:
        """Return problem ``index``, the same at every call."""

    def score(self, index: int, text: str) -> float:
        """Return how good ``text`` is as an answer to problem ``index``, from 0 to 1."""


class Task:
    """Training prompts by ordinal, held-out prompts by number or ordinal, and the reward."""

    def __init__(self, source: TaskSource, *, exact_weight: float = 0.5) -> None:
        self._source, self._exact_weight = source, exact_weight

    def train(self, ordinal: int) -> Problem:
        """Return the problem of a training ordinal."""
        return self.problem(ordinal)

    def problem(self, ordinal: int) -> Problem:
        """Return the problem of an ordinal; from `HELD_OUT` on it is a held-out one."""
        return self._source.item(self._index(ordinal))

    def held_out(self, count: int) -> list[Problem]:
        """Return the first ``count`` distinct held-out problems."""
        found: dict[str, Problem] = {}
        for problem in self._scan(_HELD_OUT_START):
            found.setdefault(problem.prompt, problem)
            if len(found) == count:
                break
        return list(found.values())

    def reward(self, ordinal: int, text: str, *, ended: bool) -> float:
        """Return the reward of an answer: for an exact match, and by the source's shaped score.

        An answer that was not ``ended`` is scored with a stray character behind it, so that
        stopping in time is part of being right.
        """
        index = self._index(ordinal)
        text = text if ended else text + "\x01"
        exact = float(text == self._source.item(index).answer)
        shaped = self._source.score(index, text)
        return self._exact_weight * exact + (1.0 - self._exact_weight) * shaped

    def _index(self, ordinal: int) -> int:
        wanted = ordinal >= HELD_OUT
        if wanted:
            stride = _HELD_OUT_STRIDE
            start = _HELD_OUT_START + (ordinal - HELD_OUT) * stride
        else:
            stride = _TRAIN_STRIDE
            start = ordinal % _CYCLE * stride
        for index in range(start, start + stride):
            if is_held_out(self._source.item(index).prompt) == wanted:
                return index
        raise ConfigError(
            f"the task has no prompt for ordinal {ordinal}: all {stride} items of it are "
            f"{'for training' if wanted else 'held out'}; choose a task with more distinct prompts"
        )

    def _scan(self, start: int) -> Iterator[Problem]:
        for index in range(start, start + 200_000):
            problem = self._source.item(index)
            if is_held_out(problem.prompt):
                yield problem


def is_held_out(prompt: str) -> bool:
    """Say whether a prompt belongs to the held-out tenth."""
    return hashlib.blake2s(prompt.encode()).digest()[0] < _HELD_OUT_SHARE * 256


class Reverse:
    """The built-in source: reverse a random string of lower-case letters."""

    def __init__(
        self, *, seed: int, shortest: int = 3, longest: int = 5, letters: int = 26
    ) -> None:
        self._seed, self._shortest, self._longest = seed, shortest, longest
        self._letters = "abcdefghijklmnopqrstuvwxyz"[:letters]

    def item(self, index: int) -> Problem:
        """Return problem ``index``."""
        random = Random(f"{self._seed}:{index}")
        length = random.randint(self._shortest, self._longest)
        word = "".join(random.choices(self._letters, k=length))
        return Problem(prompt=f"{word}>", answer=word[::-1])

    def score(self, index: int, text: str) -> float:
        """Return the share of positions that are right; a right answer with junk gets 0.8."""
        return _share_right(self.item(index).answer, text)


def _share_right(answer: str, text: str) -> float:
    if text == answer:
        return 1.0
    matches = sum(a == b for a, b in zip(answer, text, strict=False))
    return 0.8 if matches == len(answer) else matches / len(answer)


class ReasoningGym:
    """A data set of ``reasoning-gym``, imported only where needed because that takes a second."""

    def __init__(self, name: str, *, seed: int) -> None:
        import reasoning_gym  # type: ignore[import-untyped]

        settings, self._compact = _GYM[name]
        self._by_position = name in _SCORED_BY_POSITION
        self._set = reasoning_gym.create_dataset(name, size=2**31 - 1, seed=seed, **settings)

    def item(self, index: int) -> Problem:
        """Return problem ``index``, its question shortened to the part that varies."""
        entry = self._set[index]
        return Problem(prompt=self._compact(entry["question"]), answer=str(entry["answer"]))

    def score(self, index: int, text: str) -> float:
        """Return the data set's own score, or the share of positions that are right."""
        if self._by_position:
            return _share_right(self.item(index).answer, text)
        return float(self._set.score_answer(text, self._set[index]))


_ROWS = {ord(" "): "", ord("\n"): "/"}
"""Writes a matrix as its rows of digits, separated by slashes."""

_GYM: dict[str, tuple[dict[str, Any], Callable[[str], str]]] = {
    "spell_backward": (
        {"min_word_len": 3, "max_word_len": 5},
        lambda question: question.rsplit(": ", 1)[1] + ">",
    ),
    "chain_sum": (
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        lambda question: question.split("problem: ")[1].replace(" ", ""),
    ),
    "spiral_matrix": (
        {"min_n": 2, "max_n": 3},
        lambda question: question.split("order?\n")[1].strip().translate(_ROWS) + ">",
    ),
}

_SCORED_BY_POSITION = frozenset({"spiral_matrix"})
"""Data sets whose own score runs an answer as Python code, which is unsafe for a policy's text."""


def make_task(name: str, *, seed: int, exact_weight: float = 0.5) -> Task:
    """Return the named task; without reasoning-gym installed ``spell_backward`` is ``reverse``.

    Raises ``ConfigError`` for an unknown name.
    """
    if name == "reverse" or (name == "spell_backward" and not gym_installed()):
        return Task(Reverse(seed=seed), exact_weight=exact_weight)
    if name not in _GYM:
        raise ConfigError(f"task {name!r} is not known; choose one of {['reverse', *_GYM]}")
    if not gym_installed():
        raise ConfigError(f"task {name!r} needs reasoning-gym: pip install 'holdfast[rl]'")
    return Task(ReasoningGym(name, seed=seed), exact_weight=exact_weight)


def gym_installed() -> bool:
    """Say whether reasoning-gym can be imported."""
    return importlib.util.find_spec("reasoning_gym") is not None
