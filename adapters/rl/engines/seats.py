"""The engines of a pool, each with its load, its health, and the texts that its cache may have."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

from torch import Tensor

from holdfast.adapters.rl.engines.choice import EngineView
from holdfast.adapters.rl.engines.protocol import SamplingEngine
from holdfast.adapters.rl.samples.sample import Sample

_MOST_TEXTS: Final = 4096
_NEWEST: Final = 0.2
_FORGOTTEN_S: Final = 30.0

Weights: TypeAlias = tuple[Mapping[str, Tensor], int]
"""Weights, and their version."""


class EngineSource(Protocol):
    """Engines that come and go."""

    def engines(self) -> Sequence[SamplingEngine]:
        """Return those that are there now; one that stays is the same object every time."""


class EngineSeat:
    """An engine of a pool. Only `renew` may be called from any thread.

    ``running`` counts its answers, ``failures`` its failures since its last success.
    ``is_leaving``: it gets no more answers.
    """

    def __init__(self, engine: SamplingEngine) -> None:
        self.engine = engine
        self.running = self.failures = 0
        self.is_leaving = False
        self._rests_until_s = 0.0
        self._texts: OrderedDict[object, int] = OrderedDict()
        self._token_s = self._heard_s = 0.0
        self._given: Weights | None = None
        self._lock = threading.Lock()

    def view(self, *, now_s: float, silent_s: float) -> EngineView:
        """Return it as the choice sees it; all its answers are silent for ``silent_s``."""
        known = now_s < self._heard_s + _FORGOTTEN_S or self.running
        return EngineView(
            capacity=self.engine.capacity,
            running=self.running,
            rests=self.is_leaving or now_s < self._rests_until_s,
            failures=self.failures,
            token_s=max(self._token_s, silent_s) if known and self._token_s else 0.0,
        )

    def cached(self, answer: Sample) -> int:
        """Return how many tokens of an answer's text were computed here."""
        return max(self._texts.get(_of_answer(answer), 0), self._texts.get(answer.prompt, 0))

    def began(self, answer: Sample) -> None:
        """Note that it computes the prompt of an answer."""
        self.running += 1
        self._keep(answer.prompt, len(answer.prompt))

    def heard(self, answer: Sample, *, tokens: int, pause_s: float | None, now_s: float) -> None:
        """Note token number ``tokens`` of an answer, ``pause_s`` after another of its stream."""
        self._keep(_of_answer(answer), len(answer.prompt) + tokens)
        self._heard_s, self.failures = now_s, 0
        if pause_s is not None:
            before_s = self._token_s or pause_s
            self._token_s = before_s + _NEWEST * (pause_s - before_s)

    def failed(self, *, until_s: float) -> None:
        """Let it rest; it may have been restarted, so it needs the weights and has no cache."""
        self._rests_until_s = until_s
        self._given, self._token_s = None, 0.0
        self._texts.clear()
        self.failures += 1

    def loading(self) -> None:
        """Note that it gets new weights: its cache is void."""
        self._texts.clear()

    def renew(self, newest: Callable[[], Weights | None]) -> None:
        """Give it the newest weights, if it has others or has failed since it got them."""
        with self._lock:
            while (loaded := newest()) is not None and self._given is not loaded:
                weights, version = loaded
                self.engine.load(weights, version=version)
                self._given = loaded

    def _keep(self, text: object, tokens: int) -> None:
        self._texts[text] = tokens
        self._texts.move_to_end(text)
        if len(self._texts) > _MOST_TEXTS:
            self._texts.popitem(last=False)


def _of_answer(answer: Sample) -> tuple[int, int, int]:
    return answer.seed, answer.ordinal, answer.sample
