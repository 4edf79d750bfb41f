"""Execution of a scenario's strikes in a simulation, each at its moment in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from holdfast.elastic.events import Event, StepDone
from holdfast.elastic.membership.records import WorkerState
from holdfast.elastic.membership.view import role_of
from holdfast.elastic.testing.simulation.agent import SimulatedAgent
from holdfast.elastic.testing.simulation.faults import SimulatedFault, SimulatedFaultKind
from holdfast.elastic.testing.simulation.simulator import Simulation
from holdfast.tools.chaos.judging.result import Struck
from holdfast.tools.chaos.scenarios.strikes import Strike
from holdfast.tools.chaos.simulated.translate import KINDS, part_of

_RESTART_S: Final = 0.5
"""Time after which a node returns whose processes were killed."""

_HOW_BAD: Final = 0.5
_FOR_GOOD_S: Final = 1e6
_NOBODY: Final = "nobody"
_ONE: Final = ("coordinator", "job")

_Seat = tuple[str, str]
"""(node, seat); the seat is "" for a victim that is not a worker."""


class SimulatedStriker:
    """Carries out every strike at its moment; ``struck`` lists the results.

    ``names`` are the nodes' names in the scenario. ``tell`` is called for every strike that hit,
    with its victim and node.
    """

    def __init__(
        self,
        sim: Simulation,
        strikes: Iterable[Strike],
        *,
        names: Sequence[str],
        tell: Callable[[Strike, str, str], None],
    ) -> None:
        self._sim, self._names, self._tell = sim, names, tell
        self._all = sorted(strikes, key=lambda strike: strike.number)
        self._waiting = list(self._all)
        self._open = {strike.number: strike for strike in self._all}
        self._begun = False
        self._found: list[Struck] = []

    @property
    def struck(self) -> tuple[Struck, ...]:
        """The strikes so far, by time; those whose moment never came are missed and come last."""
        missed = [self._struck(strike, _NOBODY, missed=True) for strike in self._open.values()]
        return (*self._found, *missed)

    def saw(self, event: Event) -> None:
        """Schedule the strikes that wait for this event."""
        begins = isinstance(event, StepDone) and not self._begun
        self._begun = self._begun or begins
        begun: list[Strike] = []
        for strike in self._waiting:
            alike = any((one.when, one.target) == (strike.when, strike.target) for one in begun)
            if self._is_due(strike, event, begins=begins, alike=alike):
                begun.append(strike)
        self._waiting = [strike for strike in self._waiting if strike not in begun]
        for strike in begun:
            delay_s = (strike.when.s or 0.0) + strike.when.after_s
            self._sim.schedule.after(delay_s, partial(self._strike, strike))

    def _is_due(self, strike: Strike, event: Event, *, begins: bool, alike: bool) -> bool:
        when = strike.when
        if when.s is not None:
            return begins
        if when.step is not None:
            return isinstance(event, StepDone) and event.step >= when.step
        if when.recovery is not None:
            earlier = [one.number for one in self._all if one.number < strike.number]
            return event.kind == when.recovery and not (earlier and earlier[-1] in self._open)
        return event.kind == when.state and not alike

    # -- victims -----------------------------------------------------------------------------------

    def _strike(self, strike: Strike) -> None:
        del self._open[strike.number]
        part = part_of(strike.kind, strike.target.part)
        found = self._choose(self._candidates(strike), strike)
        if not found:
            self._found.append(self._struck(strike, _NOBODY, missed=True))
        for node, seat in found:
            name = seat or (part if part in _ONE else f"{part} {self._name(node)}")
            hit = self._sim.injection.strike(self._fault(strike, node, seat))
            self._found.append(self._struck(strike, name, missed=not hit))
            if hit:
                self._tell(strike, name, self._name(node))

    def _struck(self, strike: Strike, victim: str, *, missed: bool) -> Struck:
        return Struck(
            number=strike.number,
            kind=strike.kind,
            victim=victim,
            t=round(self._sim.now_s, 6),
            missed=missed,
        )

    def _name(self, node: str) -> str:
        return self._names[int(node[1:])]

    def _living(self) -> list[SimulatedAgent]:
        return [agent for _, agent in sorted(self._sim.agents.items()) if agent.alive]

    def _candidates(self, strike: Strike) -> list[_Seat]:
        """Return all victims that match part, role, rank and node."""
        target, part = strike.target, part_of(strike.kind, strike.target.part)
        if part in _ONE:
            return [(agent.name, "") for agent in self._living()[:1]]
        seats = [
            (agent.name, seat)
            for agent in self._living()
            for seat, worker in sorted(agent.crew.workers.items())
            if worker.state not in (WorkerState.DEAD, WorkerState.DONE)
            if target.role in (None, role_of(seat))
            if target.rank is None or self._rank_of(worker.incarnation) == target.rank
        ]
        if part != "worker":
            free = target.role is None and target.rank is None
            hosts = {agent.name for agent in self._living()} if free else {n for n, _ in seats}
            seats = [(name, "") for name in sorted(hosts)]
        on = target.nodes or self._names
        return [each for each in seats if self._name(each[0]) in on]

    def _rank_of(self, incarnation: str) -> int | None:
        record = self._sim.generations.get(self._sim.newest)
        members = record.members if record else ()
        return next((m.rank for m in members if m.incarnation == incarnation), None)

    def _choose(self, found: list[_Seat], strike: Strike) -> list[_Seat]:
        target = strike.target
        if target.which == "all" or not found:
            return found
        if target.which == "leader":  # the first node by name proposes, the others are its backup
            return [each for each in found if each[0] == self._living()[0].name][: target.count]
        draw = random.Random(f"victims {strike.pick}")
        return sorted(draw.sample(found, min(target.count, len(found))))

    def _fault(self, strike: Strike, node: str, seat: str) -> SimulatedFault:
        kind = KINDS[strike.kind, part_of(strike.kind, strike.target.part)]
        pick = strike.pick
        if kind is SimulatedFaultKind.WEATHER:
            pick = _HOW_BAD if strike.amount is None else strike.amount
        lasts_s = strike.lasts_s
        if strike.kind == "kill":
            lasts_s = _RESTART_S
        elif not lasts_s and kind not in (
            SimulatedFaultKind.NODE,
            SimulatedFaultKind.CRASH,
            SimulatedFaultKind.HANG,
        ):
            lasts_s = _FOR_GOOD_S
        return SimulatedFault(
            kind=kind,
            at_s=round(self._sim.now_s, 6),
            node=int(node[1:]),
            lasts_s=lasts_s,
            pick=pick,
            seat=seat,
        )
