"""Injection of a schedule's faults into a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from holdfast.elastic.membership.records import WorkerState
from holdfast.elastic.testing.simulation.faults import SimulatedFault, SimulatedFaultKind
from holdfast.elastic.testing.simulation.network import Disturbance

if TYPE_CHECKING:
    from holdfast.elastic.testing.simulation.agent import SimulatedAgent
    from holdfast.elastic.testing.simulation.simulator import Simulation

_MOST_LOSS, _MOST_DOUBLED, _MOST_DELAY_S = 0.3, 0.3, 0.3
_CALLS_AHEAD = 4


class Injection:
    """Injects faults into a simulation; ``counts`` holds the number injected of each kind."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.counts: Counter[str] = Counter()
        self._kinds: dict[SimulatedFaultKind, Callable[[SimulatedFault, SimulatedAgent], bool]] = {
            SimulatedFaultKind.WORKER: self._worker,
            SimulatedFaultKind.HANG: self._worker,
            SimulatedFaultKind.NODE: self._lose_node,
            SimulatedFaultKind.SIDECAR: self._sidecar,
            SimulatedFaultKind.PAUSE: self._pause,
            SimulatedFaultKind.CRASH: self._crash,
            SimulatedFaultKind.CUT: self._disturb,
            SimulatedFaultKind.DEAF: self._disturb,
            SimulatedFaultKind.MUTE: self._disturb,
            SimulatedFaultKind.SPLIT: self._disturb,
            SimulatedFaultKind.APART: self._part,
            SimulatedFaultKind.WEATHER: self._disturb,
            SimulatedFaultKind.OUTAGE: self._outage,
        }

    def begin(self, faults: Sequence[SimulatedFault]) -> None:
        """Schedule every fault at its time."""
        for fault in faults:
            self._sim.schedule.after(fault.at_s, partial(self.strike, fault))

    def mend(self) -> None:
        """End all faults."""
        self._sim.log("calm: every fault has ended")
        self._sim.network.mend()
        for number in range(self._sim.config.nodes):
            self._sim.start_node(f"n{number}")
        for agent in self._sim.agents.values():
            agent.resume()

    def strike(self, fault: SimulatedFault) -> bool:
        """Inject a fault now; return whether it had a target."""
        agent = self._sim.agents.get(f"n{fault.node}")
        if agent is None or not agent.alive or not self._kinds[fault.kind](fault, agent):
            return False
        self.counts[fault.kind] += 1
        self._sim.log(f"FAULT {fault.kind} at {agent.name}, lasts {fault.lasts_s} s")
        return True

    def _worker(self, fault: SimulatedFault, agent: SimulatedAgent) -> bool:
        seats = sorted(s for s, w in agent.crew.workers.items() if w.state is not WorkerState.DEAD)
        seats = [seat for seat in seats if fault.seat in ("", seat)]
        if not seats:
            return False
        seat = seats[int(fault.pick * len(seats)) % len(seats)]
        if fault.kind is SimulatedFaultKind.HANG:
            agent.crew.hang(seat, lasts_s=fault.lasts_s)
        else:
            agent.kill_worker(seat)
        return True

    def _lose_node(self, fault: SimulatedFault, agent: SimulatedAgent) -> bool:
        agent.kill()
        self._return(fault, agent)
        return True

    def _return(self, fault: SimulatedFault, agent: SimulatedAgent) -> None:
        if fault.lasts_s:
            self._sim.schedule.after(fault.lasts_s, partial(self._sim.start_node, agent.name))

    def _sidecar(self, fault: SimulatedFault, agent: SimulatedAgent) -> bool:
        agent.kill_sidecar()
        return True

    def _pause(self, fault: SimulatedFault, agent: SimulatedAgent) -> bool:
        agent.pause()
        self._sim.schedule.after(fault.lasts_s, agent.resume)
        return True

    def _crash(self, fault: SimulatedFault, agent: SimulatedAgent) -> bool:
        agent.calls.crash_at(
            int(fault.pick * _CALLS_AHEAD),
            before=fault.pick * 1000 % 2 < 1,
            then=partial(self._return, fault, agent),
        )
        return True

    def _outage(self, fault: SimulatedFault, agent: SimulatedAgent) -> bool:
        self._sim.outage(fault.lasts_s)
        return True

    def _disturb(self, fault: SimulatedFault, agent: SimulatedAgent) -> bool:
        self._begin(_disturbance(fault, agent.name, nodes=self._sim.config.nodes), fault)
        return True

    def _part(self, fault: SimulatedFault, agent: SimulatedAgent) -> bool:
        nodes = self._sim.config.nodes
        other = fault.other
        if other < 0 and nodes > 1:
            other = (fault.node + 1 + int(fault.pick * (nodes - 1))) % nodes
        if not 0 <= other < nodes or other == fault.node:
            return False
        way = int(fault.pick * 1000) % 3  # both, out, in
        disturbance = Disturbance(
            nodes=frozenset({agent.name}),
            others=frozenset({f"n{other}"}),
            outbound=way != 2,
            inbound=way != 1,
            loss=1.0,
        )
        self._begin(disturbance, fault)
        return True

    def _begin(self, disturbance: Disturbance, fault: SimulatedFault) -> None:
        self._sim.network.begin(disturbance)
        if fault.lasts_s:
            self._sim.schedule.after(fault.lasts_s, partial(self._sim.network.end, disturbance))


def _disturbance(fault: SimulatedFault, name: str, *, nodes: int) -> Disturbance:
    if fault.kind is SimulatedFaultKind.WEATHER:
        return Disturbance(
            loss=_MOST_LOSS * fault.pick,
            duplicate=_MOST_DOUBLED * (1 - fault.pick),
            delay_s=_MOST_DELAY_S * fault.pick,
        )
    if fault.kind is SimulatedFaultKind.SPLIT:
        size = 1 + int(fault.pick * max(nodes - 1, 1)) % max(nodes - 1, 1)
        side = frozenset(f"n{(fault.node + step) % nodes}" for step in range(size))
        return Disturbance(nodes=side, spares_coordinator=True, loss=1.0)
    return Disturbance(
        nodes=frozenset({name}),
        outbound=fault.kind is not SimulatedFaultKind.DEAF,
        inbound=fault.kind is not SimulatedFaultKind.MUTE,
        loss=1.0,
    )
