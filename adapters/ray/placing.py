"""The slots of a job as placement groups and actors of Ray."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.adapters.ray.child import ChildEnd
from holdfast.adapters.ray.job import RayJob
from holdfast.adapters.ray.node import NodeOrder, NodePlace, RayNode
from holdfast.adapters.ray.slots import Happening, NodeEnd, SlotEnded, SlotLost, SlotPlaced
from holdfast.elastic.errors import ConfigError

NODE_LABEL: Final = "ray.io/node-id"
_THREADS: Final = 4
_NAMED: Final = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_MOST_LETTERS: Final = 600
_log = logging.getLogger(__name__)


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the resources of a bundle as options of the actor that has all of it."""
    options: dict[str, Any] = {"num_cpus": 0}
    others = {name: amount for name, amount in resources.items() if name not in _NAMED}
    options |= {_NAMED[name]: n for name, n in resources.items() if name in _NAMED}
    return {**options, "resources": others} if others else options


@dataclass(slots=True, kw_only=True)
class _Taken:
    """A slot's actor, the place that it found, and the calls that have not returned."""

    actor: Any
    group: Any
    placing: Any = None
    running: Any = None
    place: NodePlace | None = None


class PlacedSlots:
    """Asks Ray for the nodes of slots, and gives orders to their actors."""

    def __init__(self, ray: Any, job: RayJob, *, order: NodeOrder) -> None:
        self._ray, self._job, self._order = ray, job, order
        bundles = [dict(job.resources) for _ in range(job.least)]
        self._base = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        self._taken: dict[int, _Taken] = {}
        self.ends: list[NodeEnd] = []

    def ask(self, slot: int, avoid: frozenset[str]) -> None:
        """Ask for a node for a slot; one that it has is given back.

        If Ray's control service refuses, as after a restart without its storage, the slot stays
        without a node, and the others go on.
        """
        self._give_back(slot)
        try:
            self._ask(slot, avoid)
        except self._ray.exceptions.RayError as error:
            _log.warning("slot %d: Ray cannot be asked for a node: %s", slot, _short(str(error)))

    def _ask(self, slot: int, avoid: frozenset[str]) -> None:
        group = self._base if slot < self._job.least else self._group_of_one(avoid)
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=slot if group is self._base else 0
        )
        actor = (
            self._ray.remote(RayNode)
            .options(
                **actor_options(self._job.resources),
                scheduling_strategy=strategy,
                max_concurrency=_THREADS,
                max_restarts=0,
            )
            .remote()
        )
        self._taken[slot] = _Taken(actor=actor, group=group, placing=actor.place.remote())

    def begin(self, slot: int) -> None:
        """Start the slot's part of the job."""
        taken = self._taken[slot]
        taken.running = taken.actor.run.remote(self._order)

    def leave(self, slot: int) -> None:
        """Give the slot's node a notice."""
        self._taken[slot].actor.leave.remote()

    def happened(self, timeout_s: float) -> list[Happening]:
        """Return the things that happened to slots, after so many seconds at the latest."""
        calls = {
            call: slot
            for slot, taken in self._taken.items()
            for call in (taken.placing, taken.running)
            if call is not None
        }
        if not calls:
            time.sleep(timeout_s)
            return []
        ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        return [self._result(calls[call], call) for call in ready]

    def stop(self, timeout_s: float) -> None:
        """End the parts that run, in order, and wait for them so many seconds."""
        running = [taken for taken in self._taken.values() if taken.running is not None]
        for taken in running:
            taken.actor.stop.remote()
        calls = {taken.running: taken for taken in running}
        if calls:
            self._ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)

    def close(self) -> None:
        """Give everything back to Ray."""
        for slot in list(self._taken):
            self._give_back(slot)
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.util.remove_placement_group(self._base)

    def _group_of_one(self, avoid: frozenset[str]) -> Any:
        labels = [{NODE_LABEL: f"!in({','.join(sorted(avoid))})"}] if avoid else None
        return self._ray.util.placement_group(
            [dict(self._job.resources)], strategy="STRICT_SPREAD", bundle_label_selector=labels
        )

    def _give_back(self, slot: int) -> None:
        taken = self._taken.pop(slot, None)
        if taken is None:
            return
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(taken.actor)
            if taken.group is not self._base:
                self._ray.util.remove_placement_group(taken.group)

    def _result(self, slot: int, call: Any) -> Happening:
        taken = self._taken[slot]
        is_placing = call == taken.placing
        if is_placing:
            taken.placing = None
        else:
            taken.running = None
        try:
            found = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            return self._refused(slot, error)
        except self._ray.exceptions.RayError as error:
            why = _short(" ".join(str(error).split()) or type(error).__name__)
            self._note(slot, taken, status=None, message=f"lost: {why}")
            return SlotLost(slot=slot, why=why)
        if is_placing:
            taken.place = found
            return SlotPlaced(slot=slot, node=found.node)
        return SlotEnded(end=self._ended(slot, taken, found))

    def _refused(self, slot: int, error: Any) -> Happening:
        """Pass on a mistake that the node found, or end the job with an error of its own code."""
        cause = error.cause
        if isinstance(cause, ConfigError):
            raise ConfigError(str(cause)) from error
        taken = self._taken[slot]
        end = self._note(slot, taken, status=1, message=f"{type(cause).__name__}: {cause}")
        return SlotEnded(end=end)

    def _ended(self, slot: int, taken: _Taken, end: ChildEnd) -> NodeEnd:
        return self._note(
            slot, taken, status=end.status, message=end.message, log=end.log, left=end.left
        )

    def _note(self, slot: int, taken: _Taken, **told: Any) -> NodeEnd:
        place = taken.place or NodePlace(node="", address="")
        end = NodeEnd(slot=slot, node=place.node, address=place.address, **told)
        self.ends.append(end)
        _log.info("slot %d at %s ended: %s", slot, end.address or "?", end.message)
        return end


def _short(text: str) -> str:
    """Return the beginning and the end of a long text: Ray's have the cause at either."""
    half = _MOST_LETTERS // 2
    return text if len(text) <= _MOST_LETTERS else f"{text[:half]} ... {text[-half:]}"
