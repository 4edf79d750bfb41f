"""A task for two policies: one answers, one reviews, and the first one answers again."""

from __future__ import annotations

from holdfast.adapters.rl.environments.base import Action, Observation
from holdfast.adapters.rl.environments.task import Task, make_task

_REVIEW = "?"
_AGAIN = "!"


class Reviewed:
    """Asks a task's problem; after a wrong answer the critic speaks, and the solver answers again.

    A right first answer earns both 1. Otherwise the solver earns the better of its two answers, as
    the task rewards it, times ``second``; the critic earns the gain of the second over the first.
    """

    def __init__(self, task: Task, *, second: float, solver: str, critic: str) -> None:
        if not 0 < second < 1:
            raise ValueError(f"second is {second}, needed: above 0 and below 1")
        self._task, self._second = task, second
        self._solver, self._critic = solver, critic

    def prompt(self, ordinal: int) -> str:
        """Return the task's prompt."""
        return self._task.problem(ordinal).prompt

    def respond(self, action: Action) -> Observation:
        """Judge an answer, or pass a review on."""
        if action.turn == 1:
            return Observation(text=_AGAIN, state=action.state, speaker=self._solver)
        answer = self._task.problem(action.ordinal).answer
        if action.turn == 0 and action.ended and action.text == answer:
            return Observation(reward=1.0)
        earned = self._task.reward(action.ordinal, action.text, ended=action.ended)
        if action.turn == 0:
            return Observation(text=_REVIEW, state={"first": earned}, speaker=self._critic)
        first = float(action.state["first"])
        gain = max(0.0, earned - first)
        solved = self._second * max(earned, first)
        return Observation(rewards={self._solver: solved, self._critic: gain}, reward=solved)


def make(
    *,
    seed: int,
    task: str = "reverse",
    exact_weight: float = 0.5,
    second: float = 0.5,
    solver: str = "solver",
    critic: str = "critic",
) -> Reviewed:
    """Return the environment of a named task (see `make_task`)."""
    chosen = make_task(task, seed=seed, exact_weight=exact_weight)
    return Reviewed(chosen, second=second, solver=solver, critic=critic)
