"""Asks the nodes what they hold of the newest protected step, for the forecast of a loss.

Only operations are used that leave a sidecar as it is; its inventory, which the planner takes,
would end the snapshots of the generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from holdfast.ckpt.errors import CkptError, NotFoundError
from holdfast.ckpt.memory.records import RestorePoint
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.reporting import read_all_processes
from holdfast.tools.dashboard.forecast import Held, LossForecast, forecast, groups_hit
from holdfast.tools.live.asking import AT_ONCE, TIMEOUT_S, key_of
from holdfast.tools.live.follow import Follower
from holdfast.tools.live.view import RunView

MOST_ALONE: Final = 64
"""Nodes for which the cost of each is told at once."""

_PROTECTED: Final = "protected"
_GONE: Final = ("lost", "left")


class Foreteller:
    """Answers for nodes of a running job what their loss would cost now."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

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
        run_dir = self._follower.run_dir
        key, listed = key_of(run_dir), read_all_processes(run_dir)
        addresses = {name: each.address for name, each in listed.items() if each.address}
        generation, step, witness = self._newest()
        point = _locate(addresses.get(witness, ""), key, generation=generation, step=step)
        members = {name for group in groups_hit(point.world, names) for name in group} | {witness}
        lost = set(wanted[0]) if len(wanted) == 1 else set()
        asked = sorted(members - lost or members)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(lambda name: _held(addresses.get(name), key, generation, step), asked)
            held = {name: each for name, each in zip(asked, found, strict=True) if each}
        durable = view.checkpoints.durable_step
        return [
            forecast(each, world=point.world, held=held, step=view.step, durable=durable)
            for each in wanted
        ]

    def _newest(self) -> tuple[int, int, str]:
        """Return the newest protected snapshot, and a node that knows of it."""
        found = max(
            (
                (int(each["generation"]), int(each["step"]), name)
                for name, status in self._follower.statuses.items()
                for each in _snapshots(status.status)
                if each["phase"] == _PROTECTED
            ),
            default=None,
        )
        if found is None:
            why = self._follower.silence or "no snapshot is protected yet"
            raise NotFoundError(f"it cannot be told what a loss would cost: {why}")
        return found


def _snapshots(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = status.get("snapshots")
    return found if isinstance(found, list) else []


def _locate(address: str, key: RunKey, *, generation: int, step: int) -> RestorePoint:
    client = SidecarClient(address, key, timeout_s=TIMEOUT_S)
    try:
        return client.locate(generation=generation, step=step)
    finally:
        client.close()


def _held(address: str | None, key: RunKey, generation: int, step: int) -> Held | None:
    """Return what a node holds; None if it does not answer, as if it were lost, too."""
    if address is None:
        return None
    client = SidecarClient(address, key, timeout_s=TIMEOUT_S)
    try:
        found = client.holdings(generation=generation, step=step)
    except CkptError:
        return None
    finally:
        client.close()
    return Held(blocks=found.blocks, parities=found.parities, sealed=found.sealed)
