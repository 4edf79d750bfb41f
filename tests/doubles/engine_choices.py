"""The rules of the choice of engines, as judgements of a choice that was made."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from holdfast.adapters.rl.engines.choice import (
    PAYS_TOKENS,
    SLOW,
    AnswerView,
    EngineView,
    RunningView,
)

_ROUNDING = 1e-9


def judge_choice(
    engines: Sequence[EngineView],
    waiting: Sequence[AnswerView],
    found: Sequence[tuple[int, int, str]],
) -> list[str]:
    """Return what is wrong with a choice."""
    wrong: list[str] = []
    answers = [answer for answer, _, _ in found]
    if len(set(answers)) < len(answers):
        wrong.append("an answer is sampled twice at a time")
    given = Counter(engine for _, engine, _ in found)
    wrong += [f"engine {n} is too full" for n in given if given[n] > _room(engines[n])]
    if len(found) != min(len(waiting), sum(map(_room, engines))):
        wrong.append("an answer waits although an engine has room")
    order = [(-each.tokens, number) for number, each in enumerate(waiting)]
    if answers != [number for _, number in sorted(order)[: len(found)]]:
        wrong.append("a shorter answer goes first")
    running = [each.running for each in engines]
    for answer, engine, _ in found:
        wrong += _judge_load(engines, running, waiting[answer], engine)
        running[engine] += 1
    return wrong


def _room(engine: EngineView) -> int:
    return 0 if engine.rests else engine.capacity - engine.running


def _judge_load(
    engines: Sequence[EngineView], running: Sequence[int], answer: AnswerView, engine: int
) -> list[str]:
    """Judge where one answer goes; loads count only where all engines are equally fast."""
    if any(each.token_s for each in engines):
        return []
    load = {
        n: (running[n] + 1) / each.capacity
        for n, each in enumerate(engines)
        if running[n] - each.running < _room(each)
    }
    cached = answer.cached.get(engine, 0)
    allowed = 0.0 if cached < PAYS_TOKENS else min(0.5, cached / 1024)
    least, mine = min(load.values()), load.get(engine, 0.0)
    if mine > least + allowed + _ROUNDING:
        return [f"engine {engine} has the load {mine:.2f}, another {least:.2f}"]
    best = max(load, key=lambda n: answer.cached.get(n, 0))
    tokens = answer.cached.get(best, 0)
    if tokens >= PAYS_TOKENS and cached < tokens and load[best] <= least + min(0.5, tokens / 1024):
        return [f"engine {best} has {tokens} tokens in its cache, and is not much busier"]
    return []


def judge_relief(
    engines: Sequence[EngineView],
    running: Sequence[RunningView],
    found: Sequence[tuple[int, str]],
) -> list[str]:
    """Return what is wrong with answers that are to leave slow engines."""
    wrong: list[str] = []
    numbers = [number for number, _ in found]
    if len(set(numbers)) < len(numbers):
        wrong.append("an answer leaves twice")
    if len(numbers) > sum(map(_room, engines)):
        wrong.append("more answers leave than others have room for")
    for number in numbers:
        left = engines[running[number].engine]
        faster = [
            each
            for each in engines
            if _room(each) and each is not left and 0 < each.token_s * SLOW <= left.token_s
        ]
        if not faster:
            wrong.append("an answer leaves an engine that is as fast as the others")
    return wrong


def drawn_engines(draw: random.Random, *, paced: bool) -> list[EngineView]:
    """Draw some engines; ``paced`` ones have known speeds."""
    found = []
    for _ in range(draw.randint(1, 4)):
        capacity = draw.randint(1, 8)
        found.append(
            EngineView(
                capacity=capacity,
                running=draw.randint(0, capacity),
                rests=draw.random() < 0.2,
                failures=draw.randint(0, 2),
                token_s=draw.choice((0.0, 0.05, 0.1, 2.0)) if paced else 0.0,
            )
        )
    return found


def drawn_answers(draw: random.Random, engines: int) -> list[AnswerView]:
    """Draw some waiting answers."""
    return [
        AnswerView(
            tokens=draw.randint(0, 3),
            cached={
                n: draw.choice((4, 40, 300, 2000)) for n in range(engines) if draw.random() < 0.4
            },
        )
        for _ in range(draw.randint(0, 12))
    ]


def drawn_running(draw: random.Random, engines: Sequence[EngineView]) -> list[RunningView]:
    """Draw the answers that the engines sample."""
    return [
        RunningView(engine=n, tokens=draw.randint(0, 9), since_s=draw.uniform(0, 9))
        for n, each in enumerate(engines)
        for _ in range(each.running)
    ]
