"""Bugs of the choice of engines, found by its rules on drawn engines and answers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, Final

from doubles.engine_choices import (
    drawn_answers,
    drawn_engines,
    drawn_running,
    judge_choice,
    judge_relief,
)

from holdfast.adapters.rl.engines import choice
from holdfast.adapters.rl.engines.choice import EngineView
from mutants.bug import Bug


def trial(seed: int) -> str:
    """Choose for what a seed draws; return the first thing that is wrong, or ""."""
    draw = random.Random(f"planted choice {seed}")
    engines = drawn_engines(draw, paced=draw.random() < 0.5)
    waiting, running = drawn_answers(draw, len(engines)), drawn_running(draw, engines)
    wrong = judge_choice(engines, waiting, choice.choose(engines, waiting))
    wrong += judge_relief(engines, running, choice.relief(engines, running))
    return "; ".join(wrong[:1])


# -- the bugs --------------------------------------------------------------------------------------


def _never_rests(real: Any) -> Any:
    return property(lambda self: max(0, self.capacity - self.running))


def _one_too_many(real: Any) -> Any:
    return property(lambda self: 0 if self.rests else max(0, self.capacity - self.running + 1))


def _shortest_first(real: Callable[..., Any]) -> Any:
    def choose(engines: Any, waiting: Any) -> Any:
        return real(engines, [dataclasses.replace(each, tokens=-each.tokens) for each in waiting])

    return choose


def _forgets_the_last(real: Callable[..., Any]) -> Any:
    return lambda engines, waiting: real(engines, waiting)[:-1]


def _ignores_caches(real: Callable[..., Any]) -> Any:
    return lambda engines, running, free, cached: real(engines, running, free, {})


def _cache_above_all(real: Callable[..., Any]) -> Any:
    def of(engines: Any, running: Any, free: Any, cached: Any) -> Any:
        known = max(free, key=lambda each: cached.get(each, 0))
        return (known, "") if cached.get(known) else real(engines, running, free, cached)

    return of


def _all_are_slow(real: Callable[..., Any]) -> Any:
    def slowness(engine: EngineView, fastest_s: float) -> float:
        return engine.token_s / fastest_s if fastest_s and engine.token_s else 1.0

    return slowness


def _bug(name: str, about: str, where: str, broken: Callable[[Any], Any], seed: int) -> Bug:
    return Bug(
        name=name,
        about=about,
        where=f"holdfast.adapters.rl.engines.choice:{where}",
        broken=broken,
        trial="engines",
        seed=seed,
    )


BUGS: Final = (
    _bug(
        "resting-engine",
        "an engine that failed is asked at once",
        "EngineView.room",
        _never_rests,
        1,
    ),
    _bug("full-engine", "an engine gets one answer too many", "EngineView.room", _one_too_many, 0),
    _bug("shortest-first", "the longest answers wait", "choose", _shortest_first, 2),
    _bug("forgotten-answer", "the last answer gets no engine", "choose", _forgets_the_last, 2),
    _bug("ignored-cache", "a prefix is computed again elsewhere", "_of", _ignores_caches, 3),
    _bug("greedy-cache", "all answers crowd where the prefix is", "_of", _cache_above_all, 29),
    _bug("restless-answers", "answers leave engines that are fast", "_slowness", _all_are_slow, 17),
)
