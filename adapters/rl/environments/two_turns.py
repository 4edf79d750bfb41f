"""A task in two turns: the first answer is judged, and the policy may answer again with a hint."""

from __future__ import annotations

from holdfast.adapters.rl.environments.base import Action, Observation
from holdfast.adapters.rl.environments.task import Task, make_task

_MISSING = "_"


class TwoTurns:
    """Asks a task's problem; after a wrong answer asks again, showing its right letters.

    A right first answer earns 1 and ends the episode. Otherwise the better of both answers counts,
    as the task rewards it, times ``second``.
    """

    def __init__(self, task: Task, *, second: float) -> None:
        if not 0 < second < 1:
            raise ValueError(f"second is {second}, needed: above 0 and below 1")
        self._task, self._second = task, second

    def prompt(self, ordinal: int) -> str:
        """Return the task's prompt."""
        return self._task.problem(ordinal).prompt

    def respond(self, action: Action) -> Observation:
        """Judge an answer: give a hint after the first one, the reward after the second."""
        answer = self._task.problem(action.ordinal).answer
        if action.turn == 0 and action.ended and action.text == answer:
            return Observation(reward=1.0)
        earned = self._task.reward(action.ordinal, action.text, ended=action.ended)
        if action.turn == 0:
            return Observation(text=hint(answer, action.text), state={"first": earned})
        return Observation(reward=self._second * max(earned, float(action.state["first"])))


def hint(answer: str, text: str) -> str:
    """Return the answer with the letters that ``text`` has wrong masked, and ``>``."""
    padded = text.ljust(len(answer))
    right = (a if a == b else _MISSING for a, b in zip(answer, padded, strict=False))
    return "".join(right) + ">"


def make(
    *, seed: int, task: str = "reverse", exact_weight: float = 0.5, second: float = 0.5
) -> TwoTurns:
    """Return the environment of a named task (see `make_task`)."""
    return TwoTurns(make_task(task, seed=seed, exact_weight=exact_weight), second=second)
