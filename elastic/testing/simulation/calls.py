"""An agent's calls to the coordinator over a network that loses, duplicates and delays them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from holdfast.ckpt.errors import HoldfastError
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError
from holdfast.elastic.testing.simulation.network import COORDINATOR

if TYPE_CHECKING:
    from holdfast.elastic.testing.simulation.agent import SimulatedAgent

CALL_TIMEOUT_S = 0.4

_T = TypeVar("_T")


@dataclass(slots=True)
class _CallInFlight(Generic[_T]):
    name: str
    apply: Callable[[], _T]
    then: Callable[[_T | HoldfastError], None]
    deadline_s: float = 0.0
    is_over: bool = False


class CoordinatorCalls:
    """One call at a time, each with a deadline; a failed call may or may not have taken effect.

    A request that arrives late takes effect after later ones; one that arrives twice, twice.
    """

    def __init__(self, agent: SimulatedAgent) -> None:
        self._agent, self._sim = agent, agent.sim
        self._waiting: deque[_CallInFlight[object]] = deque()
        self._names: set[str] = set()
        self._under_way = False
        self._crash: tuple[int, bool, Callable[[], None]] | None = None

    def make(
        self, name: str, apply: Callable[[], _T], then: Callable[[_T | HoldfastError], None]
    ) -> None:
        """Make a call after earlier ones; each name is queued or running at most once."""
        if name in self._names:
            return
        self._names.add(name)
        self._waiting.append(_CallInFlight(name, apply, then))  # type: ignore[arg-type]
        self._next()

    def is_waiting(self, name: str) -> bool:
        """Return whether a call of this name is queued or running."""
        return name in self._names

    def once(self, apply: Callable[[], _T], then: Callable[[_T | HoldfastError], None]) -> None:
        """Make a call at once, on a connection of its own.

        If it is lost, ``then`` is not called.
        """
        self._send(_CallInFlight("", apply, then))  # type: ignore[arg-type]

    def crash_at(self, number: int, *, before: bool, then: Callable[[], None]) -> None:
        """Lose the node at the call after ``number`` more: before it is sent, or right after."""
        self._crash = number, before, then

    def cancel_crash(self) -> None:
        """Cancel a planned crash at a call."""
        self._crash = None

    def _next(self) -> None:
        if self._under_way or not self._waiting or not self._agent.alive:
            return
        self._under_way = True
        call = self._waiting.popleft()
        call.deadline_s = self._sim.now_s + CALL_TIMEOUT_S
        if self._crash is None:
            self._send(call)
            return
        left, before, then = self._crash
        if left or not before:
            self._send(call)
        if left:
            self._crash = left - 1, before, then
        else:
            self._sim.log(f"{self._agent.name} crashes at a call")
            self._agent.kill()
            then()

    def _send(self, call: _CallInFlight[object]) -> None:
        copies = self._sim.network.fate(self._agent.name, COORDINATOR)
        for delay_s in copies:
            self._sim.schedule.after(delay_s, lambda: self._serve(call))
        if not copies or min(copies) > CALL_TIMEOUT_S:
            self._give_up(call)

    def _serve(self, call: _CallInFlight[object]) -> None:
        """Apply the call at the coordinator, and answer."""
        copies: tuple[float, ...] = ()
        result: object = None
        if not self._sim.is_out:
            try:
                result = call.apply()
            except (CoordinatorError, LeaseExpiredError) as error:
                result = error
            copies = self._sim.network.fate(COORDINATOR, self._agent.name)
        for delay_s in copies:
            self._agent.after(delay_s, lambda: self._finish(call, result))
        if not copies or self._sim.now_s + min(copies) > call.deadline_s:
            self._give_up(call)

    def _give_up(self, call: _CallInFlight[object]) -> None:
        if call.deadline_s:
            lost = CoordinatorError("no answer")
            wait_s = max(call.deadline_s - self._sim.now_s, 0.0)
            self._agent.after(wait_s, lambda: self._finish(call, lost))

    def _finish(self, call: _CallInFlight[object], result: object) -> None:
        if call.is_over:
            return
        call.is_over = True
        if call.name:
            self._under_way = False
            self._names.discard(call.name)
        call.then(result)
        self._next()
