"""The probes of `elastic.agent.reach` as messages of a simulation, resent as TCP would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from holdfast.elastic.decisions.probing import ProbedNode

if TYPE_CHECKING:
    from holdfast.elastic.testing.simulation.agent import SimulatedAgent

TRIES_S = (0.2, 0.4)
_SENT_AGAIN_S = 0.06


def ask_all(
    agent: SimulatedAgent,
    probed: Mapping[str, ProbedNode],
    *,
    then: Callable[[frozenset[str]], None],
) -> None:
    """Probe sidecars; call ``then`` with the nodes that have answered in time."""
    sim, found = agent.sim, set[str]()

    def send(name: str, address: str, left_s: float) -> None:
        if name in found:
            return
        for delay_s in sim.network.fate(agent.name, name):
            sim.schedule.after(delay_s, partial(arrive, name, address))
        if left_s > _SENT_AGAIN_S:
            agent.after(_SENT_AGAIN_S, partial(send, name, address, left_s - _SENT_AGAIN_S))

    def arrive(name: str, address: str) -> None:
        if sim.addresses[address].alive:
            for delay_s in sim.network.fate(name, agent.name):
                agent.after(delay_s, partial(found.add, name))

    def ask(tries_s: tuple[float, ...]) -> None:
        if not tries_s or len(found) == len(probed):
            then(frozenset(found))
            return
        for name, each in probed.items():
            send(name, each.address, tries_s[0])
        agent.after(tries_s[0], partial(ask, tries_s[1:]))

    ask(TRIES_S)
