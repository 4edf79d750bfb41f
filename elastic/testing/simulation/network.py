"""The network of a simulation: delayed, lost, duplicated, reordered and one-way messages.

The fate of a message is decided when it is sent: the delays after which its copies arrive, none if
it is lost. Delays differ, so messages overtake each other.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

COORDINATOR = "coordinator"
"""The name of the coordinator as an end of the network."""

Fate: TypeAlias = tuple[float, ...]
"""The delay of each copy of a message, in seconds; empty: it is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """A disturbance of messages between ``nodes`` and all others.

    Without ``nodes`` it affects all messages. With ``others``, only messages between ``nodes`` and
    ``others``. ``outbound`` and ``inbound`` are the affected directions, seen from ``nodes``. With
    ``spares_coordinator`` messages to and from the coordinator pass. ``loss`` and ``duplicate`` are
    probabilities; each copy is delayed by up to ``delay_s`` more.
    """

    nodes: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    outbound: bool = True
    inbound: bool = True
    spares_coordinator: bool = False
    loss: float = 0.0
    duplicate: float = 0.0
    delay_s: float = 0.0

    def concerns(self, source: str, target: str) -> bool:
        """Return whether it affects a message."""
        if self.spares_coordinator and COORDINATOR in (source, target):
            return False
        if not self.nodes:
            return True
        if self.others:
            leaves = source in self.nodes and target in self.others and self.outbound
            arrives = source in self.others and target in self.nodes and self.inbound
            return leaves or arrives
        leaves, arrives = source in self.nodes, target in self.nodes
        return leaves is not arrives and (self.outbound if leaves else self.inbound)

    def parts(self, names: Set[str]) -> bool:
        """Return whether two of the nodes cannot have a connection, which needs both directions."""
        if self.loss < 1.0 or not (self.outbound or self.inbound):
            return False
        side = names & self.nodes if self.nodes else names
        rest = names & self.others if self.others else names - self.nodes
        return bool(side and rest) if self.nodes else len(names) > 1


class SimulatedNetwork:
    """Decides the fate of every message."""

    def __init__(self, random: Random, *, least_s: float = 0.0005, most_s: float = 0.005) -> None:
        self._random = random.random
        self._least_s, self._span_s = least_s, most_s - least_s
        self._active: list[Disturbance] = []
        self.messages = 0

    def begin(self, disturbance: Disturbance) -> None:
        """Apply ``disturbance`` from now on."""
        self._active.append(disturbance)

    def end(self, disturbance: Disturbance) -> None:
        """End ``disturbance``; does nothing if it is not active."""
        if disturbance in self._active:
            self._active.remove(disturbance)

    def mend(self) -> None:
        """End every disturbance."""
        self._active.clear()

    def parts(self, names: Set[str]) -> bool:
        """Return whether two of the nodes cannot have a connection now."""
        return any(each.parts(names) for each in self._active)

    def fate(self, source: str, target: str) -> Fate:
        """Return the fate of a message."""
        self.messages += 1
        delay_s = self._least_s + self._span_s * self._random()
        if not self._active:
            return (delay_s,)
        copies = [delay_s]
        for each in self._active:
            if not each.concerns(source, target):
                continue
            if each.duplicate and self._random() < each.duplicate:
                copies.append(delay_s + self._span_s * self._random())
            copies = [
                copy_s + each.delay_s * self._random()
                for copy_s in copies
                if not each.loss or self._random() >= each.loss
            ]
        return tuple(copies)
