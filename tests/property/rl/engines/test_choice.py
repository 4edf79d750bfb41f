"""Answers go to engines with room, the longest first, and to caches where that pays."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from doubles.engine_choices import (
    drawn_answers,
    drawn_engines,
    drawn_running,
    judge_choice,
    judge_relief,
)
from exploring import examples
from hypothesis import given, settings

from holdfast.adapters.rl.engines.choice import (
    AnswerView,
    EngineView,
    RunningView,
    choose,
    relief,
)


@settings(max_examples=examples(200), deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_a_choice_keeps_the_rules(draw: random.Random, paced: bool) -> None:
    engines = drawn_engines(draw, paced=paced)
    waiting = drawn_answers(draw, len(engines))
    assert judge_choice(engines, waiting, choose(engines, waiting)) == []


@settings(max_examples=examples(200), deadline=None)
@given(st.randoms(use_true_random=False))
def test_only_slow_engines_lose_answers(draw: random.Random) -> None:
    engines = drawn_engines(draw, paced=True)
    running = drawn_running(draw, engines)
    assert judge_relief(engines, running, relief(engines, running)) == []


def test_the_samples_of_a_prompt_share_a_cache_until_it_costs_too_much() -> None:
    two = [EngineView(capacity=8), EngineView(capacity=8)]
    long = [AnswerView(cached={0: 512}) for _ in range(8)]
    assert [engine for _, engine, _ in choose(two, long)].count(0) == 6
    short = [AnswerView(cached={0: 20}) for _ in range(8)]
    assert [engine for _, engine, _ in choose(two, short)].count(0) == 4


def test_an_engine_that_failed_lately_comes_last_of_equal_ones() -> None:
    engines = [EngineView(capacity=2, failures=3), EngineView(capacity=2)]
    assert choose(engines, [AnswerView()])[0][:2] == (0, 1)


def test_a_slow_engine_gets_answers_only_when_no_other_has_room() -> None:
    engines = [EngineView(capacity=2, token_s=3.0), EngineView(capacity=2, token_s=0.1)]
    assert [engine for _, engine, _ in choose(engines, [AnswerView()] * 3)] == [1, 1, 0]


def test_the_longest_answers_leave_a_slow_engine() -> None:
    engines = [
        EngineView(capacity=4, running=3, token_s=3.0),
        EngineView(capacity=2, running=0, token_s=0.1),
    ]
    running = [RunningView(engine=0, tokens=n, since_s=5.0) for n in (4, 9, 7)]
    (first, why), (second, _) = relief(engines, running)
    assert (first, second) == (1, 2)
    assert why == "a token takes 3 s there, and 0.1 s elsewhere"
    assert relief(engines, [RunningView(engine=0, tokens=9, since_s=0.1)]) == []
