"""Bit flips on the wire between nodes, in the requests and answers of sidecars.

The library loaded before the C library changes the bytes that a node's processes send to and
receive from the sidecars of other nodes. It works above TCP, whose checksum would detect the
change: as a broken switch or an attacker in between does. The trainers' own traffic is not changed:
nothing guards it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from holdfast.tools.chaos.faults.injector import JobAccess, MissedError, Undo, Victim
from holdfast.tools.chaos.faults.network.kept_up import KeptUp
from holdfast.tools.chaos.faults.network.sockets import ends
from holdfast.tools.chaos.faults.preloaded.preload import FLIP, Preload
from holdfast.tools.chaos.scenarios.catalogue import Part
from holdfast.tools.chaos.scenarios.scenario import ScenarioError
from holdfast.tools.chaos.scenarios.strikes import Strike

_KIND: Final = "flip-wire"
_EVERY_BYTES: Final = 10_000_000.0

KINDS: Final = frozenset({_KIND})
TOLD: Final = "wire.json"
"""File in the run's folder that records, at the end, how many bits were changed."""


class WireInjector:
    """Flips bits between a node and all others."""

    def __init__(self) -> None:
        self._flips: list[_Flips] = []
        self._result_file: Path | None = None

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Compile the library that is loaded before the C library. Raises ``ScenarioError``."""
        for strike in strikes:
            if strike.amount is not None and strike.amount < 1:
                raise ScenarioError(
                    f"strike {strike.number} ({_KIND}): amount is {strike.amount:g}, the bytes "
                    "from one changed bit to the next; give 1 or more"
                )
        self._preload, self._result_file = Preload(site), site.folder / TOLD
        return self._preload.environment

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Begin now. Raises ``MissedError`` if there is no other node."""
        if not any(each.node != victim.node for each in site.victims("sidecar")):
            raise MissedError(f"{victim.name}: there is no sidecar of another node")
        flips = _Flips(strike, victim, site, self._preload)
        self._flips.append(flips)
        return flips.end if strike.lasts_s else None

    def close(self) -> None:
        """Stop the changes, and record how many there were."""
        for flips in self._flips:
            flips.end()
        if self._result_file is not None:
            result = {"flipped_bits": self._preload.flipped_bits}
            self._result_file.write_bytes(msgspec.json.encode(result) + b"\n")


class _Flips:
    """Flips that continue until their end, also on new connections and in new processes."""

    def __init__(self, strike: Strike, victim: Victim, site: JobAccess, preload: Preload) -> None:
        self._victim, self._site, self._preload = victim, site, preload
        self._every_bytes = _EVERY_BYTES if strike.amount is None else strike.amount
        drawn = random.Random(strike.pick)
        self._seeds = (drawn.randrange(1, 1 << 63) for _ in itertools.count())
        self._rules: list[Callable[[], None]] = []
        self._ruled: object = None
        self._kept_up = KeptUp(self._apply, name="chaos-flips")

    def end(self) -> None:
        """End the flips; a second call does nothing."""
        self._kept_up.end()
        while self._rules:
            self._rules.pop()()

    def _apply(self) -> None:
        """Put rules in force for the present processes on both sides, in both directions."""
        node, serving = self._victim.node, _by_node(self._site, "sidecar")
        there = _by_node(self._site, "node")
        there[node] = sorted({*self._victim.pids, *there.get(node, ())})
        others = {name: pids for name, pids in there.items() if name != node}
        far = _ports(pid for name, pids in serving.items() if name != node for pid in pids)
        near = _ports(serving.get(node, ()))
        outside = sorted(pid for pids in others.values() for pid in pids)
        wanted = ((there[node], far), (outside, near))
        if wanted == self._ruled:
            return
        old, self._rules, self._ruled = self._rules, [], wanted
        for pids, ports in wanted:
            if pids and ports:
                self._rules.append(self._rule(pids, ports))
        for take_back in old:
            take_back()

    def _rule(self, pids: Sequence[int], ports: Sequence[int]) -> Callable[[], None]:
        every, seed = self._every_bytes, next(self._seeds)
        return self._preload.add(FLIP, pids, ports=ports, every_bytes=every, seed=seed)


def _by_node(site: JobAccess, part: Part) -> dict[str, Sequence[int]]:
    return {each.node: each.pids for each in site.victims(part)}


def _ports(pids: Iterable[int]) -> list[int]:
    return sorted({end.local[1] for end in ends(pids) if end.listens})
