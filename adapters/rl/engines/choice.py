"""The choice of engines for answers: health, room and load, and prefixes that are cached. Pure.

The longest answers begin first, because the last one to end decides when a step can be trained. An
engine that has computed a text before has it in its prefix cache: the turns of an episode and the
samples of a prompt go there again, unless it is so much busier that this costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

PAYS_TOKENS: Final = 16
"""Fewer cached tokens do not count: caches have blocks of so many."""

_WHOLE_TOKENS: Final = 1024
_MOST_BUSIER: Final = 0.5
"""An engine may be busier by n / 1024 of its capacity for n cached tokens, by half at most."""

SLOW: Final = 4.0
_SLOW_S: Final = 0.25
"""An engine is slow if a token takes it 4 times as long as another, and at least so long."""

_SETTLED_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """An engine that samples ``running`` of ``capacity`` answers, ``token_s`` for a token of each.

    One that ``rests`` gets no answers. ``failures`` counts those since its last success;
    ``token_s`` 0: not known.
    """

    capacity: int
    running: int = 0
    rests: bool = False
    failures: int = 0
    token_s: float = 0.0

    @property
    def room(self) -> int:
        """Number of answers that it takes."""
        return 0 if self.rests else max(0, self.capacity - self.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerView:
    """An answer with ``tokens``, and how many tokens of its text each engine has cached."""

    tokens: int = 0
    cached: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningView:
    """An answer with ``tokens`` that ``engine`` samples for ``since_s``."""

    engine: int
    tokens: int
    since_s: float


def choose(
    engines: Sequence[EngineView], waiting: Sequence[AnswerView]
) -> list[tuple[int, int, str]]:
    """Return (answer, engine, reason) for each waiting answer that an engine has room for.

    The longest come first, equal ones in their order.
    """
    running = [each.running for each in engines]
    found: list[tuple[int, int, str]] = []
    for number in sorted(range(len(waiting)), key=lambda each: -waiting[each].tokens):
        free = [
            each for each, view in enumerate(engines) if running[each] - view.running < view.room
        ]
        if not free:
            break
        engine, reason = _of(engines, running, free, waiting[number].cached)
        running[engine] += 1
        found.append((number, engine, reason))
    return found


def _of(
    engines: Sequence[EngineView],
    running: Sequence[int],
    free: Sequence[int],
    cached: Mapping[int, int],
) -> tuple[int, str]:
    fastest_s = _fastest_s([engines[each] for each in free])
    load = {
        each: (running[each] + 1) / engines[each].capacity * _slowness(engines[each], fastest_s)
        for each in free
    }
    emptiest = min(free, key=lambda each: (load[each], engines[each].failures, each))
    known = max(free, key=lambda each: (cached.get(each, 0), -load[each], -each))
    tokens = cached.get(known, 0)
    if tokens < PAYS_TOKENS or known == emptiest:
        return emptiest, "the least load"
    if load[known] > load[emptiest] + min(_MOST_BUSIER, tokens / _WHOLE_TOKENS):
        return emptiest, f"the one with {tokens} tokens in its cache is much busier"
    return known, f"{tokens} tokens are in its cache"


def relief(engines: Sequence[EngineView], running: Sequence[RunningView]) -> list[tuple[int, str]]:
    """Return (running answer, reason) for those that should leave slow engines, longest first.

    They are as many as faster engines have room for. An answer that has just begun somewhere stays.
    """
    found: list[tuple[int, str]] = []
    for engine, view in enumerate(engines):
        others = [each for number, each in enumerate(engines) if number != engine and each.room]
        fastest_s = _fastest_s(others)
        if view.rests or not fastest_s or _slowness(view, fastest_s) <= 1:
            continue
        room = sum(each.room for each in others if _slowness(each, fastest_s) <= 1) - len(found)
        there = [
            number
            for number, each in enumerate(running)
            if each.engine == engine and each.since_s >= _SETTLED_S
        ]
        there.sort(key=lambda each: -running[each].tokens)
        why = f"a token takes {view.token_s:.2g} s there, and {fastest_s:.2g} s elsewhere"
        found += [(number, why) for number in there[: max(0, room)]]
    return found


def _fastest_s(engines: Sequence[EngineView]) -> float:
    return min((each.token_s for each in engines if each.token_s > 0), default=0.0)


def _slowness(engine: EngineView, fastest_s: float) -> float:
    """Return how many times as long a slow engine takes; 1 for any other."""
    if not fastest_s or engine.token_s < max(_SLOW_S, SLOW * fastest_s):
        return 1.0
    return engine.token_s / fastest_s
