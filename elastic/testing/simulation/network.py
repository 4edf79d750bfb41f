"""The network of a simulation: late, lost, doubled, overtaken and one-way messages.

Every message has its fate decided when it is sent: the delays after which its copies arrive,
none when it is lost. Delays differ, so messages overtake each other.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

COORDINATOR = "coordinator"
"""The end of the network at which the coordinator is."""

Fate: TypeAlias = tuple[float, ...]
"""After how many seconds each copy of a message arrives; empty: it is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What befalls the messages between ``nodes`` and all others; with no ``nodes``, every one.

    With ``others`` only those between ``nodes`` and these. ``outbound`` and ``inbound`` say in
    which direction as ``nodes`` see it, ``spares_coordinator`` that messages to and from the
    coordinator pass. ``loss`` and ``duplicate`` are probabilities; up to ``delay_s`` more passes
    before a copy arrives.
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
        """Say whether a message is subject to it."""
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
        """Say whether two of the nodes cannot have a connection: that takes both directions."""
        if self.loss < 1.0 or not (self.outbound or self.inbound):
            return False
        side = names & self.nodes if self.nodes else names
        rest = names & self.others if self.others else names - self.nodes
        return bool(side and rest) if self.nodes else len(names) > 1


class SimulatedNetwork:
    """Decides what becomes of every message."""

    def __init__(self, random: Random, *, least_s: float = 0.0005, most_s: float = 0.005) -> None:
        self._random = random.random
        self._least_s, self._span_s = least_s, most_s - least_s
        self._active: list[Disturbance] = []
        self.messages = 0

    def begin(self, disturbance: Disturbance) -> None:
        """Let it act from now on."""
        self._active.append(disturbance)

    def end(self, disturbance: Disturbance) -> None:
        """Let it act no longer; nothing happens when it does not."""
        if disturbance in self._active:
            self._active.remove(disturbance)

    def mend(self) -> None:
        """End every disturbance."""
        self._active.clear()

    def parts(self, names: Set[str]) -> bool:
        """Say whether two of the nodes cannot have a connection now."""
        return any(each.parts(names) for each in self._active)

    def fate(self, source: str, target: str) -> Fate:
        """Return what becomes of a message."""
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
