"""An environment in processes of its own, as a worker and a trainer call it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from holdfast.adapters.rl.environments.base import Action, Observation, ToolError
from holdfast.adapters.rl.environments.calls import CallQueue, CodeFault, Result
from holdfast.adapters.rl.environments.processes import wire
from holdfast.adapters.rl.environments.processes.pool import Outcome, ProcessPool
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.environments.waits import Waits
from holdfast.elastic.errors import JobFailedError

_LOOK_S: Final = 0.05


class ProcessCalls(CallQueue):
    """A `CallQueue` whose calls run in the processes of a pool: what takes too long is killed."""

    def __init__(
        self,
        pool: ProcessPool,
        chosen: EnvironmentConfig,
        *,
        waits: Waits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            chosen.factory,
            limit_s=chosen.limit_s,
            attempts=chosen.attempts,
            waits=waits,
            clock=clock,
        )
        self.pool = pool

    def _begin(self, number: int, action: Action) -> bool:
        question = wire.AskReply(call=number, action=action)
        return self.pool.begin(question, wanted=len(self._queue))

    def _arrived(self, wait_s: float) -> Iterator[tuple[int, Result]]:
        for number, outcome in self.pool.outcomes(wait_s):
            yield number, _result(outcome)

    def _abandon(self, number: int, why: str) -> None:
        self.pool.stop(number)


def _result(outcome: Outcome) -> Result:
    match outcome:
        case wire.Replied(observation=observation):
            return observation
        case ToolError():
            return outcome
        case wire.Faulty(why=why):
            return CodeFault(words=why)
        case _:
            return ToolError("its process sent a prompt in place of a reply")


class ProcessEnvironment:
    """An `Environment` that a pool of processes answers for; each method waits for its answer.

    A call that fails is made again as those of `CallQueue` are. Then the error is raised.
    """

    def __init__(self, pool: ProcessPool, chosen: EnvironmentConfig) -> None:
        self._pool, self._chosen = pool, chosen
        self._numbers, self._lock = itertools.count(), threading.Lock()

    def prompt(self, ordinal: int) -> str:
        """Return the prompt of an ordinal. Raises ``JobFailedError`` if there is none."""
        where = f"{self._chosen.factory}.prompt for ordinal {ordinal}"
        found = self._ask(lambda call: wire.AskPrompt(call=call, ordinal=ordinal), where)
        if isinstance(found, wire.Prompted):
            return found.prompt
        raise JobFailedError(f"{where}: {found}")

    def respond(self, action: Action) -> Observation:
        """Return the reply to a turn. Raises `ToolError` or ``JobFailedError``."""
        where = f"{self._chosen.factory}.respond for turn {action.turn} of sample {action.key}"
        found = self._ask(lambda call: wire.AskReply(call=call, action=action), where)
        if isinstance(found, wire.Replied):
            return found.observation
        raise ToolError(str(found))

    def _ask(self, question: Callable[[int], wire.Question], where: str) -> Outcome:
        with self._lock:
            for _ in range(self._chosen.attempts):
                found = self._attempt(question(next(self._numbers)))
                if isinstance(found, wire.Faulty):
                    raise JobFailedError(f"{where}{found.why}")
                if not isinstance(found, ToolError):
                    break
            return found

    def _attempt(self, question: wire.Question) -> Outcome:
        pool, limit_s = self._pool, self._chosen.limit_s
        while not pool.begin(question):
            pool.outcomes(_LOOK_S)
        until_s = time.monotonic() + limit_s
        while (left_s := until_s - time.monotonic()) > 0:
            for call, outcome in pool.outcomes(left_s):
                if call == question.call:
                    return outcome
        pool.stop(question.call)
        return ToolError(f"no reply in {limit_s:g} s")
