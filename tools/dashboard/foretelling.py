"""Asks the nodes what they hold of the newest protected step, for the forecast of a loss.

Only operations are used that leave a sidecar as it is; its inventory, which the planner takes,
would end the snapshots of the generation.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from holdfast.ckpt.errors import CkptError, NotFoundError
from holdfast.ckpt.memory.records import SnapshotWorld
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.tools.dashboard.forecast import Held, LossForecast, forecast, groups_hit
from holdfast.tools.live.asking import AT_ONCE, TIMEOUT_S
from holdfast.tools.live.follow import Follower
from holdfast.tools.live.view import RunView

MOST_ALONE: Final = 64
"""Nodes for which the cost of each is told at once."""

_TRIES: Final = 12
_WITNESSES: Final = 4
_PROTECTED: Final = "protected"
_GONE: Final = ("lost", "left")


class Foreteller:
    """Answers for nodes of a running job what their loss would cost now."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._clients: dict[str, SidecarClient] = {}
        self._known: SnapshotWorld | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def together(self, nodes: Sequence[str], view: RunView) -> LossForecast:
        """Return the cost of losing nodes at once.

        Raises ``NotFoundError`` if it cannot be told, with the reason.
        """
        return self._forecasts([sorted(set(nodes))], view)[0]

    def each(self, nodes: Sequence[str], view: RunView) -> list[LossForecast]:
        """Return the cost of losing each node alone; no ``nodes`` are all that are there."""
        there = [node.node for node in view.nodes if node.state not in _GONE]
        names = nodes or there
        if len(names) > MOST_ALONE:
            raise NotFoundError(f"{len(names)} nodes are too many to ask for each; name some")
        return self._forecasts([[name] for name in names], view)

    def _forecasts(self, wanted: Sequence[list[str]], view: RunView) -> list[LossForecast]:
        names = {name for each in wanted for name in each}
        if unknown := names - {node.node for node in view.nodes}:
            raise NotFoundError(f"the run has no node {', '.join(sorted(unknown))}")
        if view.ended_s is not None:
            raise NotFoundError("the job is over: nothing of it is in memory any more")
        for _ in range(_TRIES):
            if (found := self._look(names, alone=len(wanted) == 1)) is not None:
                world, step, held = found
                durable = view.checkpoints.durable_step
                return [
                    forecast(
                        each, world=world, held=held, step=max(view.step, step), durable=durable
                    )
                    for each in wanted
                ]
        raise NotFoundError(
            "the snapshots change faster than the nodes can be asked; parity covers "
            f"{self._parity()} of each parity group as long as a step is protected"
        )

    def _look(
        self, names: AbstractSet[str], *, alone: bool
    ) -> tuple[SnapshotWorld, int, dict[str, Held]] | None:
        """Return a protected snapshot, and what each node of the groups of ``names`` holds of it.

        With ``alone`` the nodes of ``names`` are not asked. None if a newer snapshot took its
        place meanwhile.
        """
        self._meet()
        witness, generation, step = self._newest(names)
        try:
            world = self._world(witness, generation, step)
        except NotFoundError:
            return None
        members = {name for group in groups_hit(world, names) for name in group} | {witness}
        asked = sorted(members - names if alone and members - names else members)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda name: self._held(name, generation, step), asked))
        held = {name: each for name, each in zip(asked, answers, strict=True) if each is not None}
        return (world, step, held) if all(each.sealed for each in held.values()) else None

    def _meet(self) -> None:
        """Keep a connection to every sidecar that there is."""
        key, listed = self._follower.sidecars()
        found = {name: each.address for name, each in listed.items() if each.address}
        with self._lock:
            for name in [*self._clients]:
                if found.get(name) != self._clients[name].address:
                    self._clients.pop(name).close()
            for name in found.keys() - self._clients.keys():
                self._clients[name] = SidecarClient(found[name], key, timeout_s=TIMEOUT_S)

    def _newest(self, names: AbstractSet[str]) -> tuple[str, int, int]:
        """Return a node that knows the newest protected snapshot, its generation and step."""
        told = self._follower.statuses
        order = sorted(
            self._clients,
            key=lambda name: (name in names, -told[name].generation if name in told else 0),
        )
        why = self._follower.silence or "no node answers"
        for name in order[:_WITNESSES]:
            try:
                snapshots: list[dict[str, Any]] = self._clients[name].status()["snapshots"]
            except CkptError as error:
                why = str(error)
                continue
            protected = [each for each in snapshots if each["phase"] == _PROTECTED]
            if protected:
                newest = max(protected, key=lambda each: (each["generation"], each["step"]))
                return name, int(newest["generation"]), int(newest["step"])
            why = "no snapshot is protected just now"
        raise NotFoundError(f"it cannot be told what a loss would cost: {why}")

    def _world(self, witness: str, generation: int, step: int) -> SnapshotWorld:
        if self._known is None or self._known.generation != generation:
            found = self._clients[witness].locate(generation=generation, step=step)
            self._known = found.world
        return self._known

    def _parity(self) -> str:
        count = self._known.parity if self._known else 0
        return f"any {count} node{'' if count == 1 else 's'}"

    def _held(self, name: str, generation: int, step: int) -> Held | None:
        """Return what a node holds; None if it does not answer, as if it were lost, too."""
        client = self._clients.get(name)
        if client is None:
            return None
        try:
            found = client.holdings(generation=generation, step=step)
        except CkptError:
            return None
        return Held(blocks=found.blocks, parities=found.parities, sealed=found.sealed)
