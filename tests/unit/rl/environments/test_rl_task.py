"""Prompts are a function of their ordinal, splits are disjoint, rewards follow their definition."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.adapters.rl.environments.task import gym_installed, is_held_out, make_task
from holdfast.adapters.rl.samples.noise import choose, uniform
from holdfast.elastic.errors import ConfigError

TASKS = ["reverse", *(["spell_backward", "chain_sum", "spiral_matrix"] if gym_installed() else [])]


@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_a_function_of_the_ordinal_and_splits_are_disjoint(name: str) -> None:
    one, two = make_task(name, seed=7), make_task(name, seed=7)
    train = [one.train(ordinal) for ordinal in range(100)]
    assert train[::-1] == [two.train(ordinal) for ordinal in reversed(range(100))]
    held_out = {problem.prompt for problem in one.held_out(50)}
    assert len(held_out) == 50
    assert all(is_held_out(prompt) for prompt in held_out)
    assert not held_out & {problem.prompt for problem in train}
    assert all((p.prompt + p.answer).isascii() for p in train)


@pytest.mark.parametrize("name", TASKS)
def test_only_the_exact_answer_with_its_end_token_earns_everything(name: str) -> None:
    task = make_task(name, seed=7, exact_weight=0.5)
    answer = task.train(4).answer
    assert task.reward(4, answer, ended=True) == 1.0
    assert task.reward(4, answer, ended=False) < 1.0
    assert task.reward(4, answer + "x", ended=True) <= 0.5
    assert make_task(name, seed=7, exact_weight=1.0).reward(4, answer, ended=False) == 0.0


@pytest.mark.skipif(not gym_installed(), reason="needs reasoning-gym")
def test_a_matrix_is_asked_for_row_by_row_and_no_answer_is_ever_run() -> None:
    task = make_task("spiral_matrix", seed=7, exact_weight=0.0)
    for ordinal in range(20):
        problem = task.train(ordinal)
        rows = problem.prompt.removesuffix(">").split("/")
        assert len(rows) in (2, 3)
        assert all(len(row) == len(rows) for row in rows)
        assert sorted(problem.answer.split()) == sorted("".join(rows))
        assert problem.answer.startswith(" ".join(rows[0]))
    assert task.reward(0, "exit()", ended=True) == 0.0
    answer = task.train(0).answer
    assert task.reward(0, answer[:1], ended=True) == pytest.approx(1 / len(answer))


def test_the_built_in_task_reverses() -> None:
    problem = make_task("reverse", seed=1).train(0)
    assert problem.prompt == problem.answer[::-1] + ">"


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="'chess' is not known"):
        make_task("chess", seed=0)


def test_noise_is_uniform_and_depends_on_every_coordinate() -> None:
    grid = np.meshgrid(np.arange(40), np.arange(8), np.arange(10), indexing="ij")
    noise = uniform(3, *(axis.ravel() for axis in grid))
    assert len(set(noise.tolist())) == noise.size
    assert noise.min() >= 0
    assert noise.max() < 1
    assert abs(noise.mean() - 0.5) < 0.02
    assert noise.tolist() != uniform(4, *(axis.ravel() for axis in grid)).tolist()


def test_choice_follows_the_probabilities() -> None:
    probabilities = np.array([0.1, 0.2, 0.0, 0.7], np.float32)
    with np.errstate(divide="ignore"):
        logits = np.tile(np.log(probabilities), (10_000, 1))
    noise = (np.arange(10_000) + 0.5) / 10_000
    counts = np.bincount(choose(logits, noise), minlength=4) / 10_000
    assert counts.tolist() == pytest.approx(probabilities.tolist(), abs=1e-3)
